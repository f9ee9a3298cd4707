"""Loads pages in Chromium without a screen and writes a picture of each beside it.

Run as a program of its own, `python render.py [--width 390] [--dark] page.html ...`: prints one line of JSON for each
page, with what the page itself reports about its layout, and all errors that the browser logged.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

from PySide6.QtCore import QEventLoop, QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

WIDTH = 1000
SETTLE_MS = 1000
LIMIT_MS = 60_000
# What the browser made of the page: its extent, pictures without an extent, texts that stick out of
# their picture, and texts that lie on each other.
LAYOUT = """JSON.stringify({
  title: document.title, background: getComputedStyle(document.body).backgroundColor,
  headings: [...document.querySelectorAll('h2')].map(h => h.textContent),
  width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
  pictures: document.querySelectorAll('svg').length,
  empty: [...document.querySelectorAll('svg')].filter(s => !(s.getBoundingClientRect().width > 4)).length,
  outside: [...document.querySelectorAll('svg text')].filter(t => {
    const a = t.getBoundingClientRect(), b = t.closest('svg').getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
  }).map(t => t.textContent),
  colliding: [...document.querySelectorAll('svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()])
      .filter(([, r]) => r.width > 0);
    return boxes.flatMap(([a, r], i) => boxes.slice(i + 1).filter(([, s]) =>
      Math.min(r.right, s.right) - Math.max(r.left, s.left) > 1 &&
      Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top) > 3).map(([b]) => a + ' / ' + b));
  }),
})"""


UNFOLD = "document.querySelectorAll('details').forEach(d => { d.open = true; }); 1"


class Page(QWebEnginePage):
    """Keeps what the browser logs."""

    def __init__(self, parent):
        super().__init__(parent)
        self.logged = []

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.logged.append(message)


def wait(connect):
    """Run the event loop until a callback is called, and return what it was given."""
    loop, results = QEventLoop(), []

    def done(*given):
        results.append(given[0] if given else None)
        loop.quit()

    QTimer.singleShot(LIMIT_MS, loop.quit)
    connect(done)
    if not results:
        loop.exec()
    if not results:
        sys.exit("the browser did not answer in time")
    return results[0]


def main(paths, width, dark, unfold):
    # Read when the browser starts; 0 is Blink's number for dark.
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] += (
        f" --blink-settings=preferredColorScheme={int(not dark)}"
    )
    application = QApplication([])
    view = QWebEngineView()
    page = Page(view)
    view.setPage(page)
    for path in paths:
        page.logged.clear()
        view.resize(width, 600)
        view.show()
        page.load(QUrl.fromLocalFile(str(path.resolve())))
        loaded = wait(lambda done: page.loadFinished.connect(done))
        if unfold:
            wait(lambda done: page.runJavaScript(UNFOLD, 0, done))
        found = json.loads(wait(lambda done: page.runJavaScript(LAYOUT, 0, done)))
        view.resize(width, int(found["height"]) + 8)
        wait(lambda done: QTimer.singleShot(SETTLE_MS, done))
        view.grab().save(str(path.with_suffix(".png")))
        print(json.dumps({**found, "loaded": loaded, "logged": list(page.logged)}), flush=True)
    view.close()
    application.quit()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--width", type=int, default=WIDTH)
    options.add_argument(
        "--dark", action="store_true", help="as readers see it who prefer dark pages"
    )
    options.add_argument("--unfold", action="store_true", help="with all that is folded open")
    options.add_argument("paths", nargs="+", type=Path)
    chosen = options.parse_args()
    main(chosen.paths, chosen.width, chosen.dark, chosen.unfold)
