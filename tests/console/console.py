"""The console in a real browser, and what the browser complains of."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from playwright.async_api import ConsoleMessage, Page, expect

from tests.support.browser import browsing
from tests.support.processes import PATIENCE

# Beside the other tests a browser may get a small part of a processor.
expect.set_options(timeout=1_000 * PATIENCE)

#: What a browser says of each answer that is no success. That the API refuses something is no fault of the page.
_ANSWERS = "Failed to load resource"


@dataclass
class Complaints:
    """What went wrong in a page: exceptions, and violations of the content security policy."""

    all: list[str] = field(default_factory=list[str])

    def of(self, page: Page) -> None:
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.all.append(f"exception: {error}"))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(_ANSWERS):
            self.all.append(message.text)


@dataclass
class Tabs:
    """Tabs of one browser, with nothing shared but what a browser shares."""

    first: Page
    complaints: Complaints

    async def another(self) -> Page:
        page = await self.first.context.new_page()
        self.complaints.of(page)
        return page


@asynccontextmanager
async def console(url: str, place: str = "") -> AsyncGenerator[Tabs]:
    """A tab with the console; when the test ends, the browser must not have complained."""
    async with browsing() as page:
        complaints = Complaints()
        complaints.of(page)
        page.set_default_timeout(1_000 * PATIENCE)
        await page.set_viewport_size({"width": 1280, "height": 800})
        await page.goto(f"{url}/{place}")
        yield Tabs(page, complaints)
        assert complaints.all == []
