"""Front page and changelog of the site are the files of the repository, so that they cannot differ from them."""

from pathlib import Path
from typing import Any

SOURCES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace a page by the file it stands for; links into `docs/` become links between pages."""
    source = SOURCES.get(page.file.src_uri)
    if source is None:
        return markdown
    text = (Path(config.config_file_path).parent / source).read_text(encoding="utf-8")
    return text.replace("](docs/", "](")
