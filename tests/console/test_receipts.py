"""Messages of the console whose receipt is lost, or late: each counts once, however it is sent again."""

import asyncio

import pytest
from playwright.async_api import Route, expect

from tests.console.console import console
from tests.console.test_talk import start
from tests.support.plugin import StackFactory
from tests.support.stack import Stack

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def desk(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.console.agents:tested")


async def lose_the_answer(route: Route) -> None:
    await route.fetch()
    await route.abort()


async def test_a_message_whose_receipt_was_lost_counts_once_however_it_is_sent_again(desk: Stack) -> None:
    async with desk.talk() as talk, console(desk.url) as tabs:
        page = tabs.first
        await talk.create("hello")
        await talk.until_boundary()
        await page.goto(f"{desk.url}/#/sessions/{talk.session_id}")
        await expect(page.locator(".turn-end")).to_have_count(1)

        await page.route("**/v1/dispatches", lose_the_answer)
        await page.get_by_label("Message", exact=True).fill("hello again")
        await page.get_by_role("button", name="Send").click()
        await expect(page.get_by_text("it counts once")).to_be_visible()
        await page.unroute("**/v1/dispatches")
        # Who looks elsewhere meanwhile finds the text where it was.
        await page.get_by_role("link", name="Timeline").click()
        await page.get_by_role("link", name="Chat").click()
        await page.get_by_role("button", name="Send").click()
        await expect(page.get_by_label("Message", exact=True)).to_have_value("")

        await expect(page.locator(".turn-end")).to_have_count(2)
        await page.get_by_label("Message", exact=True).fill("the last one")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("You said: the last one")).to_be_visible()
        assert await page.locator(".said.user").count() == 3


async def test_a_message_whose_receipt_was_lost_is_sent_again_with_what_it_was_to_do_then(desk: Stack) -> None:
    async with console(desk.url) as tabs:
        page = tabs.first
        await start(page, "typist", "drip 100 words delay 20")

        await page.route("**/v1/dispatches", lose_the_answer)
        await page.get_by_label("When it is read").select_option("collect")
        await page.get_by_label("Message", exact=True).fill("hello again")
        await page.get_by_role("button", name="Send").click()
        await expect(page.get_by_text("it counts once")).to_be_visible()
        await page.unroute("**/v1/dispatches")
        await expect(page.locator(".turn-end")).to_have_count(2)
        await page.get_by_role("button", name="Send").click()

        await expect(page.get_by_label("Message", exact=True)).to_have_value("")
        assert await page.locator(".said.user").count() == 2


async def test_a_session_whose_receipt_was_lost_is_started_once(desk: Stack) -> None:
    async with console(desk.url) as tabs:
        page = tabs.first

        await page.route("**/eve/v1/session", lose_the_answer)
        await start(page, "helpdesk", "once and never again")
        await expect(page.get_by_text("it counts once")).to_be_visible()
        await page.unroute("**/eve/v1/session")
        await page.get_by_role("link", name="Agents").click()
        await page.get_by_role("link", name="Sessions", exact=True).click()
        await page.get_by_role("link", name="New", exact=True).click()
        await page.get_by_label("Agent of the session").select_option("helpdesk")
        await page.get_by_role("button", name="Start").click()
        await expect(page.get_by_text("You said: once and never again")).to_be_visible()

        async with desk.talk() as talk:
            listed = (await talk.http.get("/v1/sessions", params={"q": "once and never again"})).json()["sessions"]
        assert len(listed) == 1


async def test_a_message_that_is_under_way_while_another_place_is_shown_is_not_there_to_be_sent_again(
    desk: Stack,
) -> None:
    async with desk.talk() as talk, console(desk.url) as tabs:
        page = tabs.first
        await talk.create("hello")
        await talk.until_boundary()
        await page.goto(f"{desk.url}/#/sessions/{talk.session_id}")
        await expect(page.locator(".turn-end")).to_have_count(1)
        may_go = asyncio.Event()

        async def wait(route: Route) -> None:
            await may_go.wait()
            await route.continue_()

        await page.route("**/v1/dispatches", wait)
        await page.get_by_label("Message", exact=True).fill("hello again")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Send")).to_be_disabled()
        await page.get_by_role("link", name="Timeline").click()
        await page.get_by_role("link", name="Chat").click()
        await expect(page.get_by_role("button", name="Send")).to_be_disabled()
        may_go.set()

        await expect(page.locator(".turn-end")).to_have_count(2)
        await expect(page.get_by_label("Message", exact=True)).to_have_value("")
