"""Front page and changelog of the site are the files of the repository, so that they cannot differ from them.

And `<!-- file: examples/transforms/pinn.py -->` in a page is that file.
"""

import re
from pathlib import Path
from typing import Any

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
