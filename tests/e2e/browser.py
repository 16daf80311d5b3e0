"""A real browser on the pages of real servers; and what it took a picture of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

SIZE = {"width": 1400, "height": 1600}
# It asks for nothing but the pages; the graph of a flow run is drawn by WebGL, here in software.
OPTIONS = [
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMEOUT_MS = 300_000


@contextmanager
def opened_browser() -> Iterator[Page]:
    """Debian's Chromium without a window; skips where it is not installed."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium here (Debian's package chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(TIMEOUT_MS)
        expect.set_options(timeout=TIMEOUT_MS)
        yield page
        browser.close()


def is_drawn(picture: bytes, blank: bytes) -> bool:
    """Whether a part of a page shows something: such a picture does not compress to nearly nothing."""
    return len(picture) > 2 * len(blank)


def keep(picture: bytes, folder: Path, name: str) -> None:
    """For people to look at."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(picture)
