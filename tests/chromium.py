"""Chromium, and pages in it whose errors and requests are noted."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Started; a test that asks for it is skipped where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class WatchedPage:
    """A page in a new context, and all that went wrong in it or was asked of a network.

    Args:
        settings: of the context.
    """

    def __init__(self, browser: Browser, *, wait_ms: float, **settings: Any) -> None:
        self.context: BrowserContext = browser.new_context(**settings)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(wait_ms)
        self.wrong: list[str] = []
        self.urls: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text))
        self.page.on("request", lambda request: self.urls.append(request.url))
