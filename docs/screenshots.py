"""Pictures of every page of the site, in a real browser, and what does not fit. Run by hand: it needs Qt's browser.

    make docs && pip install PySide6 && python docs/screenshots.py site pictures

Pages are opened 1280 and 420 pixels wide. An element that reaches beyond the page is an error on both; a line of code
that has to be scrolled to is one on the wide page.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

WIDE, NARROW = 1280, 420
HEIGHT, TALLEST = 1400, 6000
PAUSE = 700  # milliseconds in which a page is laid out
MEASURE = """
(() => {
  const width = document.documentElement.clientWidth, scrolls = new Set(["auto", "scroll", "hidden"]);
  const inScrolled = e => e && (scrolls.has(getComputedStyle(e).overflowX) || inScrolled(e.parentElement));
  const text = e => e.textContent.trim().slice(0, 60);
  const outside = [...document.querySelectorAll("article *")].filter(
    e => e.getBoundingClientRect().right > width + 1 && !inScrolled(e));
  const cut = [...document.querySelectorAll("article pre code")].filter(e => e.scrollWidth > e.clientWidth + 1);
  const height = document.documentElement.scrollHeight;
  return JSON.stringify({height: height, outside: outside.map(text), cut: cut.map(text)});
})()
"""


class Camera:
    """Opens one page after the other; what Qt has finished calls the next method."""

    def __init__(self, app: QApplication, shots: Iterator[tuple[Path, int, Path]]) -> None:
        self.app, self.shots, self.problems = app, shots, list[str]()
        self.view = QWebEngineView()
        self.view.loadFinished.connect(lambda _: QTimer.singleShot(PAUSE, self.measure))
        self.view.show()
        self.next()

    def next(self) -> None:
        shot = next(self.shots, None)
        if shot is None:
            self.app.quit()
            return
        self.page, self.width, self.picture = shot
        self.view.resize(self.width, HEIGHT)
        self.view.load(QUrl.fromLocalFile(str(self.page)))

    def measure(self) -> None:
        self.view.page().runJavaScript(MEASURE, self.measured)

    def measured(self, answer: str) -> None:
        found = json.loads(answer)
        cut = found["cut"] if self.width == WIDE else []
        self.problems += [f"{self.page}, {self.width} pixels: {text!r}" for text in found["outside"] + cut]
        self.view.resize(self.width, min(found["height"], TALLEST))
        QTimer.singleShot(PAUSE, self.shoot)

    def shoot(self) -> None:
        self.picture.parent.mkdir(parents=True, exist_ok=True)
        self.view.grab().save(str(self.picture))
        self.next()


def main(site: str, pictures: str) -> int:
    """Return 1 when something does not fit."""
    pages = sorted(Path(site).resolve().rglob("index.html"))
    names = ["-".join(page.relative_to(Path(site).resolve()).parts[:-1]) or "start" for page in pages]
    shots = (
        (page, width, Path(pictures) / f"{name}-{width}.png")
        for page, name in zip(pages, names, strict=True)
        for width in (WIDE, NARROW)
    )
    app = QApplication([])
    camera = Camera(app, shots)
    app.exec()
    print("\n".join(camera.problems) or f"{len(pages)} pages fit")
    sys.stdout.flush()
    os._exit(bool(camera.problems))  # Qt's own end takes its threads down in the wrong order


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
