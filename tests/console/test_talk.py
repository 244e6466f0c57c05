"""Talking to sessions in the console: a real browser, a real API, a real worker."""

import json
import re

import pytest
from playwright.async_api import Page, expect

from tests.console.console import console
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def desk(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.console.agents:tested")


async def start(page: Page, agent: str, message: str) -> None:
    await page.get_by_role("link", name="New", exact=True).click()
    await page.get_by_label("Agent of the session").select_option(agent)
    await page.get_by_label("First message").fill(message)
    await page.get_by_role("button", name="Start").click()


async def test_a_session_is_started_and_goes_on(desk: Stack) -> None:
    async with console(desk.url) as tabs:
        page = tabs.first
        await start(page, "helpdesk", "hello there")
        messages = page.get_by_role("group", name="Messages")
        await expect(messages.get_by_text("You said: hello there")).to_be_visible()

        await page.get_by_label("Message", exact=True).fill('use find_order {"number": 7}')
        await page.keyboard.press("Enter")

        await expect(messages.locator(".call.completed").get_by_text("find_order")).to_be_visible()
        await expect(messages.locator(".turn-end")).to_have_count(2)
        await expect(messages.locator(".said.user")).to_have_count(2)


async def test_a_reload_in_mid_text_doubles_and_loses_nothing(desk: Stack) -> None:
    async with console(desk.url) as tabs:
        page = tabs.first
        await start(page, "typist", "drip 120 words delay 20")
        text = page.locator(".said.agent .clipped")
        await expect(page.locator(".said.live")).to_have_count(1)
        lengths: list[int] = []
        while len(lengths) < 3 and await page.locator(".said.live").count():
            await page.reload()
            await expect(text).to_have_count(1)
            lengths.append(len(await text.inner_text()))
        await expect(page.locator(".turn-end")).to_have_count(1)
        shown = await text.inner_text()
        async with desk.talk() as talk:
            talk.session_id = _session_in(page)
            [whole] = [
                event["data"]["message"]
                for event in await talk.until_boundary()
                if event["type"] == "message.completed"
            ]

        assert lengths, "the reply had ended before the first reload"
        assert shown.strip() == whole.strip()
        assert await text.count() == 1


async def test_of_two_tabs_one_answers_and_the_other_one_shows_by_whom(desk: Stack) -> None:
    async with desk.talk() as talk, console(desk.url) as tabs:
        await talk.create('use refund {"order": 7, "amount": 12.5}')
        await talk.until_boundary()
        first, second = tabs.first, await tabs.another()
        here = f"{desk.url}/#/sessions/{talk.session_id}"
        await first.goto(here)
        # In the other tab nothing tells of the answer, until it is given again.
        await second.goto(f"{desk.url}/#/inbox")
        card = second.locator(".requests li").filter(has_text=talk.session_id)
        await expect(card.get_by_role("button", name="Deny")).to_be_visible()
        await second.route("**/v1/inputs?*", lambda route: route.abort())

        await first.get_by_role("button", name="Approve").click()
        await expect(first.get_by_text("You have answered: approved")).to_be_visible()
        await card.get_by_role("button", name="Deny").click()

        await expect(card.get_by_text(re.compile("Already answered by local-dev: approved"))).to_be_visible()
        await expect(first.get_by_text("Refunded 12.50 EUR for order 7.").first).to_be_visible()


async def test_arguments_are_changed_and_a_denial_has_its_reason(desk: Stack) -> None:
    async with desk.talk() as talk, console(desk.url) as tabs:
        page = tabs.first
        await talk.create('use refund {"order": 8, "amount": 100}')
        await talk.until_boundary()
        await page.goto(f"{desk.url}/#/sessions/{talk.session_id}")
        await page.get_by_role("button", name="Change arguments").click()
        field = page.get_by_label("Arguments, as JSON")
        await field.fill("{not json")
        await page.get_by_role("button", name="Approve as changed").click()
        await expect(page.get_by_text(re.compile("These arguments are not JSON"))).to_be_visible()
        await field.fill('{"order": 8, "amount": 10}')
        await page.get_by_role("button", name="Approve as changed").click()
        await expect(page.get_by_text("Refunded 10.00 EUR for order 8.").first).to_be_visible()

        await talk.send('use close_ticket {"ticket": "T-1"}')
        await page.get_by_label(re.compile("Reason")).fill("not yet")
        await page.get_by_role("button", name="Deny").click()

        await expect(page.get_by_text("Reason: not yet", exact=True)).to_be_visible()


async def test_long_numbers_are_approved_with_all_their_digits(desk: Stack) -> None:
    async with desk.talk() as talk, console(desk.url) as tabs:
        page, number = tabs.first, 1234567890123456789
        await talk.create(f'use refund {{"order": {number}, "amount": 1}}')
        await talk.until_boundary()
        await page.goto(f"{desk.url}/#/sessions/{talk.session_id}")
        await expect(page.locator(".ask .arguments")).to_contain_text(f'"order": {number},')

        await page.get_by_role("button", name="Change arguments").click()
        await page.get_by_role("button", name="Approve as changed").click()

        await expect(page.get_by_text(f"Refunded 1.00 EUR for order {number}.").first).to_be_visible()


async def test_arguments_that_are_changed_read_as_they_are(desk: Stack) -> None:
    ticket = "T-1\u202e2-T\u200b\U000e0041\u009b"
    async with desk.talk() as talk, console(desk.url) as tabs:
        page = tabs.first
        await talk.create(f"use close_ticket {json.dumps({'ticket': ticket})}")
        await talk.until_boundary()
        await page.goto(f"{desk.url}/#/sessions/{talk.session_id}")
        await page.get_by_role("button", name="Change arguments").click()

        await expect(page.get_by_label("Arguments, as JSON")).to_have_value(
            '{\n  "ticket": "T-1\\u202e2-T\\u200b\\udb40\\udc41\\u009b"\n}'
        )
        await page.get_by_role("button", name="Approve as changed").click()
        await expect(page.get_by_text("You have answered: approved")).to_be_visible()
        events = await talk.until_boundary()

    [result] = [event["data"]["result"] for event in events if event["type"] == "action.result"]
    assert result["output"] == f"Ticket {ticket} is closed."


async def test_a_question_is_answered_by_an_option_and_in_words(desk: Stack) -> None:
    async with desk.talk() as talk, console(desk.url) as tabs:
        page = tabs.first
        await talk.create('use ask_question {"prompt": "Which colour?", "options": ["red", "blue"]}')
        await page.goto(f"{desk.url}/#/sessions/{talk.session_id}")
        await page.get_by_role("button", name="blue").click()
        await expect(page.get_by_text("You have answered: blue")).to_be_visible()
        await expect(page.locator(".turn-end")).to_have_count(2)

        await talk.send('use ask_question {"prompt": "What name?"}')
        await page.get_by_label("Answer", exact=True).fill("Ada")
        await page.get_by_role("button", name="Answer", exact=True).click()

        await expect(page.get_by_text("You have answered: Ada")).to_be_visible()


async def test_it_is_used_with_the_keyboard_alone(desk: Stack) -> None:
    async with console(desk.url, "#/agents") as tabs:
        page = tabs.first
        press = page.keyboard.press
        await expect(page.get_by_role("heading", name="helpdesk")).to_be_visible()

        await press("n")
        await expect(page.get_by_label("First message")).to_be_focused()
        await page.keyboard.type("hello keys")
        await press("Enter")
        await expect(page.get_by_text("You said: hello keys")).to_be_visible()
        await press("m")
        await page.keyboard.type('use refund {"order": 9, "amount": 1}')
        await press("Enter")
        await expect(page.get_by_role("button", name="Approve")).to_be_visible()
        await press("Escape")
        await press("r")
        await expect(page.get_by_role("button", name="Approve")).to_be_focused()
        await press("Enter")

        await expect(page.get_by_text("Refunded 1.00 EUR for order 9.").first).to_be_visible()
        await press("g")
        await press("a")
        await expect(page.get_by_role("heading", name="Agents")).to_be_visible()


async def test_a_waiting_message_is_taken_back_and_a_turn_is_stopped(desk: Stack) -> None:
    async with console(desk.url) as tabs:
        page = tabs.first
        await start(page, "helpdesk", 'use wait {"seconds": 60}')
        await expect(page.get_by_text("Runs wait.")).to_be_visible()
        await page.get_by_label("Message", exact=True).fill("and then this")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Take back").click()
        await expect(page.get_by_text("A message was not read (withdrawn)")).to_be_visible()
        await expect(page.get_by_text("and then this")).to_have_count(0)

        await page.get_by_role("button", name="Stop").click()

        await expect(page.get_by_text("The turn was cancelled.")).to_be_visible()


async def test_an_api_that_is_killed_and_comes_back_is_found_again(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.console.agents:tested")
    async with console(stack.url) as tabs:
        page = tabs.first
        await start(page, "typist", "drip 100 words delay 20")
        await expect(page.locator(".said.live")).to_have_count(1)
        field = page.get_by_label("Message", exact=True)

        stack.apis[0].kill()
        await field.fill("say I am back")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("Not sent.")).to_be_visible()
        await expect(field).to_have_value("say I am back")
        stack.start_api({"PERDURE_PORT": stack.url.rpartition(":")[2]})
        await page.get_by_role("button", name="Send").click()

        await expect(page.locator(".said.agent", has_text="I am back")).to_have_count(1)
        await expect(page.locator(".said.user")).to_have_count(2)
        events = await _events(stack, _session_in(page))
        assert [event["type"] for event in events].count("message.received") == 2
        # The end of the first reply came while nobody could be asked.
        whole = next(event["data"]["message"] for event in events if event["type"] == "message.completed")
        assert await page.locator(".said.agent .clipped").first.inner_text() == whole


def _session_in(page: Page) -> str:
    found = re.search(r"#/sessions/(ses_\w+)", page.url)
    assert found is not None, page.url
    return found[1]


async def _events(stack: Stack, session_id: str) -> list[Json]:
    async with stack.talk() as talk:
        answer = await talk.http.get(f"/v1/sessions/{session_id}/events", params={"limit": 1000})
    return answer.json()["events"]


async def test_what_nobody_works_at_says_so(make_stack: StackFactory) -> None:
    stack = make_stack(workers=0, agents="tests.console.agents:agents")
    async with console(stack.url) as tabs:
        page = tabs.first
        await start(page, "helpdesk", "is anybody there")

        await expect(page.locator(".why")).to_contain_text("worker")
        await expect(page.get_by_text("Waits for a worker.")).to_be_visible()
        stack.start_worker()
        await expect(page.get_by_text("You said: is anybody there")).to_be_visible()
        await expect(page.locator(".why")).to_have_count(0)


async def test_a_request_that_another_one_answers_stays_in_the_inbox_with_its_answer(desk: Stack) -> None:
    async with desk.talk() as talk, console(desk.url) as tabs:
        page = tabs.first
        await talk.create('use close_ticket {"ticket": "T-7"}')
        await talk.until_boundary()
        await page.goto(f"{desk.url}/#/inbox")
        card = page.locator(".requests li").filter(has_text=talk.session_id)
        await card.get_by_label(re.compile("Reason")).fill("half a reas")
        [asked] = (await talk.http.get("/v1/inputs", params={"sessionId": talk.session_id})).json()["inputs"]

        await talk.http.post(f"/v1/inputs/{asked['requestId']}", json={"optionId": "approve"})

        await expect(card.get_by_text("Already answered by local-dev: approved")).to_be_visible()


async def test_a_worker_that_dies_in_mid_text_leaves_one_text(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.console.agents:tested")
    async with console(stack.url) as tabs:
        page = tabs.first
        await start(page, "typist", "drip 60 words delay 30")
        await expect(page.locator(".said.live .clipped")).to_contain_text("w10")

        stack.workers[0].kill()
        stack.start_worker()

        await expect(page.locator(".turn-end")).to_have_count(1)
        [text] = await page.locator(".said.agent .clipped").all_inner_texts()
        assert text.split() == [f"w{number}" for number in range(60)]
        assert "step.superseded" in {event["type"] for event in await _events(stack, _session_in(page))}
