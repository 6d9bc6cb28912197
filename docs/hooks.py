"""Front page and changelog of the site are the files of the repository, so that they cannot differ from them.

`<!-- file: examples/transforms/pinn.py -->` in a page is that file. Names in code, `sf.gather(params)`, are links.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

# Links, headings and blocks stay as they are; what is left of a page may have names in code.
KEPT = re.compile(r"<(a|h[1-6]|pre)\b.*?</\1>", re.DOTALL)
NAME = re.compile(r"<code>sf\.([A-Za-z_.0-9]+)[^<]*</code>")
SAME = ("reshard", "check")  # functions in modules of the same names
SOURCES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace a page by the file it stands for; links into `docs/` become links between pages."""
    root = Path(config.config_file_path).parent
    source = SOURCES.get(page.file.src_uri)
    if source is not None:
        return (root / source).read_text(encoding="utf-8").replace("](docs/", "](")

    def shown(marker: re.Match[str]) -> str:
        return f"```python\n{(root / marker[1]).read_text(encoding='utf-8')}```"

    return re.sub(r"^<!-- file: (\S+) -->$", shown, markdown, flags=re.MULTILINE)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Have names of the library in code lead to their entries; those without one stay as they are."""
    html = html.replace(r"\|", "|")  # in the code of a table, as GitHub wants it
    if "<blockquote>" in html:  # lines that begin with `>>>` are citations in Markdown
        raise PluginError(f"{page.file.src_uri}: a citation, or an example in a docstring that docs/examples.py missed")

    def link(name: re.Match[str]) -> str:
        path = f"{name[1]}.{name[1]}" if name[1] in SAME else name[1]
        return f'<autoref identifier="shardfn.{path}" optional>{name[0]}</autoref>'

    parts, end = [], 0
    for kept in KEPT.finditer(html):
        parts += [NAME.sub(link, html[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*parts, NAME.sub(link, html[end:])])
