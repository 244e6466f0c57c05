"""The console in a browser: how soon it shows something, and what many open ones cost the API."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

from playwright.async_api import Browser, Page, async_playwright

from bench import consumption
from bench.plan import Plan
from bench.stack import Product
from bench.stats import median, quantile
from bench.table import Line, Target
from perdure.protocol import names
from perdure.protocol.deliveries import LOCAL
from perdure.protocol.events import EventType, NewEvent, step_coordinates, turn_coordinates
from perdure.store.open import open_store
from perdure.store.values import Commit, NewSession, SessionChange

from .idle import in_crowds, settled

NAME = "console"

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
_LONG = "ses_long"
#: Events of a turn, and turns of a commit.
_TURN = 8
_AT_ONCE = 100
#: Milliseconds until something is there that one can read.
_SOON = 1_000


async def measure(product: Product, plan: Plan) -> list[Line]:
    async with asyncio.timeout(plan.patience * 10), browsing() as browser:
        parked: list[str] = []

        async def park() -> None:
            parked.append(await product.client.parked())

        await in_crowds(park, plan.parked)
        last = await _write(product.database, plan.console_events)
        await settled((product.worker, product.api), plan)
        url = f"http://127.0.0.1:{product.port}/"
        loads = range(plan.console_loads)
        lists = [await _shown(browser, url, ".entry") for _ in loads]
        session = f"{url}#/sessions/{_LONG}"
        talks = [await _shown(browser, session, f".said.agent:has-text('{last}')") for _ in loads]
        share, requests = await _open(browser, url, parked, product, plan)
    of_list, of_talk = f"list of {plan.parked:,} sessions", f"session of {plan.console_events:,} events"
    crowd = f"{plan.consoles} open consoles"
    return [
        Line(NAME, f"{of_list}, until it is shown, p50", "ms", median(lists), target=Target("≤", _SOON)),
        Line(NAME, f"{of_list}, until it is shown, p95", "ms", quantile(lists, 0.95)),
        Line(NAME, f"{of_talk}, until its end is shown, p50", "ms", median(talks), target=Target("≤", 2 * _SOON)),
        Line(NAME, f"{of_talk}, until its end is shown, p95", "ms", quantile(talks, 0.95)),
        Line(NAME, f"{crowd}, processor of the API over {plan.idle_seconds:g} s", "%", share, target=Target("≤", 10)),
        Line(NAME, f"{crowd}, requests", "/s", requests),
    ]


@asynccontextmanager
async def browsing() -> AsyncGenerator[Browser]:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        raise RuntimeError(f"The row {NAME} needs a browser: there is none of {', '.join(_BROWSERS)}.")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, args=_OPTIONS)
        try:
            yield browser
        finally:
            await browser.close()


async def _shown(browser: Browser, url: str, what: str) -> float:
    """Milliseconds from an address until this is there, in a browser that has nothing of it."""
    page = await (await browser.new_context()).new_page()
    begun = perf_counter()
    await page.goto(url, wait_until="commit")
    await page.locator(what).first.wait_for()
    took = 1e3 * (perf_counter() - begun)
    await page.context.close()
    return took


async def _open(browser: Browser, url: str, parked: Sequence[str], product: Product, plan: Plan) -> tuple[float, float]:
    """The share of a processor that consoles with a session each take, and their requests per second."""
    count = 0

    def asked(_: object) -> None:
        nonlocal count
        count += 1

    pages: list[Page] = []
    for session_id in parked[: plan.consoles]:
        page = await (await browser.new_context()).new_page()
        await page.goto(f"{url}#/sessions/{session_id}", wait_until="commit")
        await page.locator(".said.agent").first.wait_for()
        page.on("request", asked)
        pages.append(page)
    # They ask less often the longer nothing changes.
    await asyncio.sleep(plan.idle_seconds)
    count, cpu = 0, consumption.of(product.api).cpu
    await asyncio.sleep(plan.idle_seconds)
    share = 100 * (consumption.of(product.api).cpu - cpu) / plan.idle_seconds
    requests = count / plan.idle_seconds
    for page in pages:
        await page.context.close()
    return share, requests


async def _write(database: str, events: int) -> str:
    """A session with so many events, which has ended; what it said last."""
    turns = max(1, events // _TURN)
    store = await open_store(database)
    try:
        await store.create_session(
            NewSession(_LONG, agent="bench", mode="conversation", token_hash=_LONG, principal=LOCAL)
        )
        for first in range(0, turns, _AT_ONCE):
            some = [event for turn in range(first, min(turns, first + _AT_ONCE)) for event in _turn(turn)]
            await store.commit(Commit(session_id=_LONG, events=some))
        ended = NewEvent(type=EventType.SESSION_COMPLETED, key=names.session_key("completed"))
        await store.commit(Commit(_LONG, events=[ended], change=SessionChange(status="completed")))
    finally:
        await store.close()
    return _said(turns - 1)


def _said(turn: int) -> str:
    return f"This was turn number {turn}."


def _turn(turn: int) -> list[NewEvent]:
    def of_turn(what: str, type: str, **data: str) -> NewEvent:
        return NewEvent(type=type, key=names.turn_key(turn, what), data={**data, **turn_coordinates(turn)}, turn=turn)

    def of_step(what: str, type: str, **data: str) -> NewEvent:
        key, data_of = names.step_key(turn, 0, what), {**data, **step_coordinates(turn, 0)}
        return NewEvent(type=type, key=key, data=data_of, turn=turn, step=0)

    return [
        of_turn("started", EventType.TURN_STARTED),
        of_turn("message", EventType.MESSAGE_RECEIVED, message=f"Tell me the number of turn {turn}, please."),
        of_step("started", EventType.STEP_STARTED),
        of_step("text/0", EventType.MESSAGE_APPENDED, messageDelta=_said(turn)),
        of_step("message", EventType.MESSAGE_COMPLETED, message=_said(turn), finishReason="stop"),
        of_step("completed", EventType.STEP_COMPLETED, finishReason="stop"),
        of_turn("completed", EventType.TURN_COMPLETED),
        of_turn("waiting", EventType.SESSION_WAITING, wait="next-user-message"),
    ]
