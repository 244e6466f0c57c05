"""A browser without a window: Chromium, as the machine has it."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, async_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: Tests may run as root, and nothing outside of this machine is asked for anything.
_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@asynccontextmanager
async def browsing() -> AsyncGenerator[Page]:
    """An empty page of a browser of its own; without a browser there is nothing to test with."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"NOT TESTED IN A BROWSER: there is none of {', '.join(_NAMES)}")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, args=_OPTIONS)
        try:
            # With a context of its own it can have more tabs.
            yield await (await browser.new_context()).new_page()
        finally:
            await browser.close()
