"""The pictures of the console in the docs: `python -m tests.console.screenshots docs/images`, or `make screenshots`.

They show the real product: a Temporal server, a worker and an API of their own, and sessions of the help desk.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Page, expect

from tests.console.console import console
from tests.support.stack import Stack

TALKS = (
    "Please track parcel 4812",
    "Can you find order 77?",
    'I have my money back: use close_ticket {"ticket": "T-219"}',
    'What was billed? use billing {"message": "use find_order {\\"number\\": 12}"}',
    'A mug is missing: use ask_question {"prompt": "Which mug?", "options": ["blue", "white"], "allowFreeform": true}',
    "Good morning!",
)
LATE = 'It came late: use refund {"order": 4711, "amount": 5, "note": "late"}'
BROKEN = (
    'It is broken, too: use track_parcel {"order": 4711} '
    'then use refund {"order": 4711, "amount": 42.5, "note": "arrived broken"}'
)


async def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, Stack(Path(place), agents="tests.console.agents:agents") as stack:
        session_id = await _talked(stack)
        async with console(stack.url) as tabs:
            await _pictures(tabs.first, stack.url, session_id, folder)


async def _talked(stack: Stack) -> str:
    """Sessions of all kinds, and the one that the pictures are of."""
    for message in TALKS:
        async with stack.talk() as talk:
            await talk.say(message)
    async with stack.talk() as talk:
        await talk.say("Please find order 4711")
        await talk.say(LATE)
        [asked] = (await talk.http.get("/v1/inputs", params={"sessionId": talk.session_id})).json()["inputs"]
        answer = {"optionId": "deny", "reason": "It was on time."}
        assert (await talk.http.post(f"/v1/inputs/{asked['requestId']}", json=answer)).is_success
        await talk.until_boundary()
        await talk.send(BROKEN)
        await talk.until("input.requested", start=talk.cursor)
        return talk.session_id


async def _pictures(page: Page, url: str, session_id: str, folder: Path) -> None:
    here = f"{url}/#/sessions/{session_id}"

    async def taken(name: str) -> None:
        await page.screenshot(path=folder / f"console-{name}.png", animations="disabled")

    await page.set_viewport_size({"width": 1240, "height": 760})
    await page.goto(here)
    await expect(page.get_by_role("button", name="Approve")).to_be_visible()
    await expect(page.locator(".why.asks")).to_be_visible()
    await taken("chat")
    await page.emulate_media(color_scheme="dark")
    await taken("dark")
    await page.emulate_media(color_scheme="light")
    await page.goto(f"{here}/timeline")
    await page.locator(".line.call").filter(has_text="track_parcel").click()
    await expect(page.get_by_role("heading", name="Attempts")).to_be_visible()
    await taken("timeline")
    await page.goto(f"{here}/events")
    await page.locator(".event").filter(has_text="actions.requested").last.click()
    await taken("events")
    await page.goto(f"{url}/#/inbox")
    await expect(page.locator(".ask.open").first).to_be_visible()
    await taken("inbox")
    await page.goto(f"{url}/#/agents")
    await page.locator(".tool summary").nth(2).click()
    await taken("agents")
    await page.goto(f"{url}/#/health")
    await expect(page.locator(".tile").first).to_be_visible()
    await taken("health")
    await page.set_viewport_size({"width": 390, "height": 780})
    await page.goto(here)
    await expect(page.get_by_role("button", name="Approve")).to_be_visible()
    await taken("phone")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")))
