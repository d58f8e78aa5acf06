"""Takes the picture of the dashboard that README and guide show, of any broker that has something to show:
`.venv/bin/python -m tests.e2e.dashboard.pictures http://127.0.0.1:8080 docs/images/dashboard.png`."""

from __future__ import annotations

import io
import sys

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.e2e.dashboard.conftest import FLAGS, chromium
from tests.e2e.dashboard.screen import Screen

_SIZE = {"width": 1280, "height": 985}


def main(url: str, path: str) -> None:
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        page = browser.new_page(viewport=_SIZE, color_scheme="light", reduced_motion="reduce")
        Screen(page, url).open().press("15 min")
        page.mouse.move(0, 0)
        page.wait_for_timeout(1500)
        data = page.screenshot()
        browser.close()
    Image.open(io.BytesIO(data)).convert("RGB").save(path, optimize=True)  # the repository keeps every version


if __name__ == "__main__":
    main(*sys.argv[1:])
