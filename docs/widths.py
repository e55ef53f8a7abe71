"""Checks that no page of the site is wider than a phone: `python docs/widths.py`.

It opens the pages that `mkdocs build` has made. A table or a block of code may scroll by itself;
the page may not. Where no Chromium is installed, it checks nothing, and says so.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SITE = Path(__file__).parent.parent / "build" / "site"
PHONE_WIDTH = 390
_WIDTH = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"


def main() -> int:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.stdout.write("widths of pages: not checked, as no Chromium is installed\n")
        return 0
    wide = 0
    with (
        sync_playwright() as play,
        play.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page(viewport={"width": PHONE_WIDTH, "height": 844})
        for file in sorted(SITE.rglob("index.html")):
            page.goto(file.as_uri())
            width = page.evaluate(_WIDTH)
            if width > PHONE_WIDTH:
                wide += 1
                sys.stdout.write(f"{file}: {width} pixels wide, of {PHONE_WIDTH}\n")
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
