"""What the console shows of sessions that are written into the store directly: long, hostile, and behind a key."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent, turn_coordinates
from perdure.store.values import SessionChange
from tests.api.served import Api, of_turn, serving, session_ended, step, text_delta, turn_events
from tests.conformance.npm import node_with
from tests.console.console import console
from tests.console.test_pages import KEY, KEYS

pytestmark = pytest.mark.timeout(120)

AXE = Path(__file__).parent / "axe"

#: How long the browser takes for two pictures, at rest and while a list is scrolled from its end to its beginning.
SCROLL = """async (rows) => {
  const step = Math.ceil((rows.scrollHeight - rows.clientHeight) / 60);
  const pictures = async (change) => {
    const began = performance.now();
    change();
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    return performance.now() - began;
  };
  const rest = [], scrolled = [];
  let most = 0;
  for (let number = 0; number < 60; number++) {
    if (number % 3 == 0) rest.push(await pictures(() => {}));
    scrolled.push(await pictures(() => { rows.scrollTop -= step; }));
    most = Math.max(most, rows.querySelectorAll("*").length);
  }
  const median = (of) => of.sort((one, other) => one - other)[of.length >> 1];
  return {rest: median(rest), scrolled: median(scrolled), most, top: rows.scrollTop};
}"""


def received(turn: int, message: str) -> NewEvent:
    data = {"message": message, **turn_coordinates(turn)}
    return NewEvent(type=EventType.MESSAGE_RECEIVED, key=names.turn_key(turn, "message/0"), data=data, turn=turn)


def called(turn: int, tool: str, given: Any, output: Any) -> list[NewEvent]:
    """A step with one call."""
    call = {"kind": "tool-call", "callId": f"call_{turn}", "toolName": tool, "input": given}
    result = {"kind": "tool-result", "callId": f"call_{turn}", "toolName": tool, "output": output}
    return [
        of_turn(turn, "started", EventType.TURN_STARTED),
        step(turn, 0, "started", EventType.STEP_STARTED),
        step(turn, 0, "actions", EventType.ACTIONS_REQUESTED, actions=[call]),
        step(turn, 0, "result", EventType.ACTION_RESULT, result=result, status="completed"),
        step(turn, 0, "completed", EventType.STEP_COMPLETED, finishReason="tool-calls"),
        of_turn(turn, "completed", EventType.TURN_COMPLETED),
    ]


async def long_session(api: Api, events: int) -> str:
    """A session with so many events, as a page would see it after months."""
    session_id = (await api.create("a long story"))["sessionId"]
    number = 0
    while number * 8 < events:
        turns = range(number, min(number + 100, events // 8 + 1))
        await api.emit(session_id, *(event for turn in turns for event in turn_events(turn, ("a ", f"reply {turn}"))))
        number = turns.stop
    return session_id


@pytest.mark.alone
async def test_a_session_of_ten_thousand_events_scrolls(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session_id = await long_session(api, 10_000)
        async with console(api.url, f"#/sessions/{session_id}") as tabs:
            page = tabs.first
            rows = page.get_by_role("group", name="Messages")
            await expect(rows.get_by_text("reply 1250", exact=False)).to_be_visible()
            chat = await rows.evaluate(SCROLL)
            await expect(rows.get_by_text("a reply 0", exact=True)).to_be_visible()

            await page.get_by_role("link", name="Events", exact=True).click()
            await page.get_by_label("with pieces of texts").check()
            rows = page.get_by_role("group", name="Events")
            await rows.evaluate("(rows) => rows.scrollTop = rows.scrollHeight")
            await expect(rows.get_by_text("10007", exact=True)).to_be_visible()
            events = await rows.evaluate(SCROLL)

    for seen in (chat, events):
        assert seen["top"] == 0
        # What is in the page does not grow with the session.
        assert seen["most"] < 600
        # Each picture is there in time for 60 of them in a second, and one late one in two is allowed.
        assert seen["scrolled"] - seen["rest"] < 33, seen


async def test_hostile_content_is_text(tmp_path: Path) -> None:
    attack = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    reversed_name = "invoice\u202egnp.exe"
    deep = "[" * 10_000 + "]" * 10_000
    line = "x" * 1_000_000
    async with serving(tmp_path) as api:
        session_id = (await api.create(attack, tags={"where": attack}))["sessionId"]
        await api.emit(
            session_id,
            received(0, attack),
            *turn_events(0, (attack,)),
            *called(1, "<b>tool</b>", {"name": reversed_name, "attack": attack}, deep),
            *called(2, "constructor", {"__proto__": {"x": 1}}, line),
            received(3, f"javascript:alert(1) {reversed_name}"),
            received(4, line),
        )
        async with console(api.url, f"#/sessions/{session_id}") as tabs:
            page = tabs.first
            messages = page.get_by_role("group", name="Messages")
            await expect(messages.get_by_text("20 kB of 1.0 MB")).to_be_visible()
            assert await page.evaluate("document.body.innerText.length") < 60_000
            await messages.get_by_role("button", name="Show more").click()
            await expect(messages.get_by_text("84 kB of 1.0 MB")).to_be_visible()
            # What the arguments of a call say is what is there, in this order.
            await messages.evaluate("(rows) => rows.scrollTop = 0")
            call = messages.locator(".call").first
            await call.locator(".input-of summary").click()
            await expect(call.get_by_text("invoice⟪U+202E⟫gnp.exe").first).to_be_visible()
            await expect(call.locator("h2 code")).to_have_text("<b>tool</b>")
            for tab in ("Timeline", "Events"):
                await page.get_by_role("link", name=tab, exact=True).click()
                await expect(page.locator(".line, .event").first).to_be_visible()
            hit, images = await page.evaluate("[window.hit, document.querySelectorAll('#app img, #app script').length]")

    assert (hit, images) == (None, 0)


async def test_deeply_nested_values_are_shown(tmp_path: Path) -> None:
    async with serving(tmp_path) as api, console(api.url) as tabs:
        files = await tabs.first.locator("script[src]").first.get_attribute("src") or ""
        length = await tabs.first.evaluate(
            """async (file) => {
              const { pretty } = await import(new URL(file.replace("main.js", "format.js"), document.baseURI));
              let value = 1;
              for (let depth = 0; depth < 10000; depth++) value = depth % 2 ? [value] : {a: value};
              return pretty(value, 5000).length;
            }""",
            files,
        )

    assert 5_000 <= length < 6_000


async def test_without_a_key_it_asks_for_one_and_keeps_it_in_the_tab(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=KEYS, trust_loopback=False) as api:
        sent: list[tuple[str, str | None]] = []
        headers = {"x-api-key": KEY}
        answer = await api.http.post("/eve/v1/session", json={"message": "behind the key"}, headers=headers)
        assert answer.status_code == 202
        async with console(api.url) as tabs:
            page = tabs.first
            page.on("request", lambda request: sent.append((request.url, request.headers.get("authorization"))))
            field = page.get_by_label("Key", exact=True).last
            await field.fill("not-the-key")
            await page.keyboard.press("Enter")
            await expect(page.get_by_text("The API refuses this key")).to_be_visible()
            await field.fill(KEY)
            await page.keyboard.press("Enter")
            entry = page.get_by_role("link", name="behind the key")
            await expect(entry).to_be_visible()
            await page.reload()
            await expect(entry).to_be_visible()
            other = await tabs.another()
            await other.goto(api.url)

            await expect(other.get_by_role("heading", name="The API wants a key")).to_be_visible()
            cookies = await page.context.cookies()
            kept = await page.evaluate("JSON.stringify(localStorage)")

    assert cookies == []
    assert KEY not in kept
    assert not any(KEY in url for url, _ in sent)
    assert any(header == f"Bearer {KEY}" for _, header in sent)


async def test_an_older_api_lacks_views_and_says_so_in_a_sentence(tmp_path: Path) -> None:
    async def missing(route: Route) -> None:
        body = json.dumps({"error": True, "status": 404, "message": "Cannot find any route"})
        await route.fulfill(status=404, content_type="application/json", body=body)

    async with serving(tmp_path) as api, console(api.url) as tabs:
        page = tabs.first
        session_id = (await api.create("hello"))["sessionId"]
        for path in ("**/v1/health", "**/v1/agents", "**/why"):
            await page.route(path, missing)
        await page.goto(f"{api.url}/#/health")
        await expect(page.get_by_text("is not in this API: it is older than the console.")).to_be_visible()
        await page.reload()
        await page.goto(f"{api.url}/#/agents")
        await expect(page.get_by_text("shows its default agent only")).to_be_visible()
        await expect(page.get_by_role("heading", name="concierge")).to_be_visible()
        await page.goto(f"{api.url}/#/sessions/{session_id}")

        await expect(page.get_by_text("Waits for: ")).to_be_visible()


async def test_who_is_no_operator_sees_the_health_without_workers(tmp_path: Path) -> None:
    async def shown(route: Route) -> None:
        queue = {"name": "perdure-turns", "kind": "workflows", "pollers": 0, "backlog": 3}
        store, temporal = (
            {"kind": "sqlite", "ok": True, "latencyMs": 1},
            {"ok": False, "latencyMs": 4000, "problem": "?"},
        )
        health = {"version": "1", "now": "", "store": store, "temporal": temporal, "queues": [queue]}
        await route.fulfill(status=200, content_type="application/json", body=json.dumps(health))

    async with serving(tmp_path) as api, console(api.url) as tabs:
        await tabs.first.route("**/v1/health", shown)
        await tabs.first.goto(f"{api.url}/#/health")

        await expect(tabs.first.get_by_text("Workers are shown to operators only.")).to_be_visible()
        await expect(tabs.first.get_by_text("nobody")).to_be_visible()
        await expect(tabs.first.get_by_text("does not answer")).to_be_visible()


async def test_a_replay_shows_the_session_as_it_was(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session_id = (await api.create("hello"))["sessionId"]
        await api.emit(session_id, *turn_events(0, ("first",)), *turn_events(1, ("second",)))
        await api.emit(session_id, session_ended(), change=SessionChange(status="completed"))
        async with console(api.url, f"#/sessions/{session_id}") as tabs:
            page = tabs.first
            await expect(page.get_by_text("second", exact=True)).to_be_visible()

            await page.get_by_role("button", name="Replay").click()
            await page.get_by_role("slider", name="Event").focus()
            await page.keyboard.press("Home")
            await expect(page.get_by_text("first", exact=True)).to_have_count(0)
            for _ in range(3):
                await page.keyboard.press("ArrowRight")

            await expect(page.get_by_text("first", exact=True)).to_be_visible()
            await expect(page.get_by_text("second", exact=True)).to_have_count(0)
            await page.get_by_role("link", name="Back to now").click()
            await expect(page.get_by_text("second", exact=True)).to_be_visible()


async def test_a_search_finds_sessions_and_filters_narrow_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        for number in range(60):
            await api.create(f"story {number}")
        needle = await api.create("the needle", prefix="/agents/clerk")
        await api.http.patch(f"/v1/sessions/{needle['sessionId']}", json={"tags": {"job": "Nightly"}})
        async with console(api.url) as tabs:
            page = tabs.first
            entries = page.locator(".entry")
            await expect(page.get_by_role("link", name="the needle")).to_be_visible()

            await page.keyboard.press("/")
            await page.keyboard.type("STORY 7")
            await expect(entries).to_have_count(1)
            for text in ("Clerk", "job:night"):
                await page.get_by_label("Search sessions").fill(text)
                await expect(page.get_by_role("link", name="the needle")).to_be_visible()
            await page.get_by_label("Search sessions").fill("")
            await page.get_by_label("Agent", exact=True).select_option("clerk")
            await expect(entries).to_have_count(1)
            await page.get_by_label("Status", exact=True).select_option("failed")

            await expect(page.get_by_text("No session is like that")).to_be_visible()


#: The places of the console, and what is there when a place is.
PLACES = {
    "sessions": ".entry",
    "sessions/{}": ".said.agent",
    "sessions/{}/timeline": ".line",
    "sessions/{}/events": ".event",
    "inbox": ".ask.open",
    "agents": ".agent",
    "health": ".tiles",
    "new": ".new-session form",
}
REQUEST: dict[str, Any] = {
    **{"requestId": "inp_1", "sessionId": "ses_1", "agent": "bursar", "kind": "approval", "status": "open"},
    **{"tool": "pay", "callId": "c", "prompt": "Pay 5?", "arguments": {"amount": 5}, "options": []},
    **{"responders": {"kind": "anyone", "values": [], "quorum": 2}, "openedAt": "2026-01-01T00:00:00Z"},
}


@pytest.mark.parametrize("colours", ["light", "dark"])
async def test_it_is_accessible(tmp_path: Path, colours: str) -> None:
    async def asked(route: Route) -> None:
        await route.fulfill(status=200, content_type="application/json", body=json.dumps({"inputs": [REQUEST]}))

    node_with(AXE)
    # The colours are all that is different.
    rules = ("color-contrast",) if colours == "dark" else ()
    async with serving(tmp_path) as api:
        session_id = (await api.create("hello"))["sessionId"]
        talk = [received(0, "hello"), *turn_events(0), *called(1, "weather", {"city": "Rome"}, "Sunny")]
        await api.emit(session_id, *talk)
        async with console(api.url) as tabs:
            page = tabs.first
            await page.route("**/v1/inputs?*", asked)
            await page.emulate_media(color_scheme="dark" if colours == "dark" else "light")
            for place, there in PLACES.items():
                await page.goto(f"{api.url}/#/{place.format(session_id)}")
                await expect(page.locator(there).first).to_be_visible()

                assert await violations(page, *rules) == [], place
            await page.keyboard.press("Escape")
            await page.keyboard.press("?")
            await expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
            assert await violations(page, *rules) == [], "help"
            await page.keyboard.press("Escape")
            await page.get_by_role("button", name="Key", exact=True).click()
            await expect(page.get_by_role("dialog", name="Key")).to_be_visible()
            assert await violations(page, *rules) == [], "key"
            await page.keyboard.press("Escape")
            await page.set_viewport_size({"width": 390, "height": 780})
            for place in ("sessions", f"sessions/{session_id}"):
                await page.goto(f"{api.url}/#/{place}")
                await expect(page.locator(PLACES[place.replace(session_id, "{}")]).first).to_be_visible()

                assert await violations(page, *rules) == [], f"{place} on a phone"
                assert await page.evaluate("document.documentElement.scrollWidth") == 390


async def violations(page: Page, *rules: str) -> list[Any]:
    """What axe finds, by all of its rules unless some are named."""
    # Run by the debugger: the policy of the page would not let it in.
    await page.evaluate((AXE / "node_modules" / "axe-core" / "axe.min.js").read_text())
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found: dict[str, Any] = await page.evaluate("(options) => axe.run(document, options)", options)
    return [(each["id"], [node["html"][:160] for node in each["nodes"][:3]]) for each in found["violations"]]


async def test_a_tab_that_nobody_looks_at_asks_nothing(tmp_path: Path) -> None:
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); %s }"
    hide %= "document.dispatchEvent(new Event('visibilitychange'));"
    async with serving(tmp_path) as api:
        session_id = (await api.create("hello"))["sessionId"]
        await api.emit(session_id, *turn_events(0))
        async with console(api.url) as tabs:
            page = tabs.first
            await page.clock.install()
            await page.goto(f"{api.url}/#/sessions/{session_id}")
            await page.reload()
            await expect(page.locator(".connection.live")).to_be_visible()
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))

            async with page.expect_event("requestfailed", lambda request: "events/stream" in request.url):
                await page.evaluate(hide, True)
            asked.clear()
            await page.clock.fast_forward("10:00")
            assert asked == []
            await api.emit(session_id, *turn_events(1, ("while it was hidden",)))
            await page.evaluate(hide, False)

            await expect(page.get_by_text("while it was hidden")).to_be_visible()
    assert any(url.endswith("events/stream?after=7") for url in asked), asked


async def test_who_is_new_begins_with_a_session_and_keeps_what_they_write(tmp_path: Path) -> None:
    async with serving(tmp_path) as api, console(api.url) as tabs:
        page = tabs.first
        await expect(page.get_by_role("heading", name="Start your first session")).to_be_visible()
        field = page.get_by_label("First message")
        await field.fill("half a sent")

        await api.create("of somebody else")
        await expect(page.get_by_role("link", name="of somebody else")).to_be_visible()

        await expect(field).to_have_value("half a sent")
        await page.get_by_role("button", name="Start").click()
        await expect(page.get_by_role("heading", name="half a sent")).to_be_visible()


async def test_a_session_shows_its_plan_and_its_lanes(tmp_path: Path) -> None:
    steps = [{"stepId": 1, "title": "Look", "status": "done"}, {"stepId": 2, "title": "Write", "status": "in_progress"}]
    plan = {"objective": "Find the error", "status": "active", "steps": steps}
    async with serving(tmp_path) as api:
        session_id = (await api.create("hello"))["sessionId"]
        work = {"agent": "concierge", "id": session_id, "input": "pay what is due", "lane": "cron"}
        lane = (await api.http.post("/v1/dispatches", json=work)).json()["sessionId"]
        data = {"plan": plan, "changed": [1, 2], **turn_coordinates(0)}
        await api.emit(session_id, NewEvent(type=EventType.PLAN_UPDATED, key="0/0/plan", data=data, turn=0, step=0))
        async with console(api.url, f"#/sessions/{session_id}") as tabs:
            page = tabs.first
            await page.get_by_text("Plan: Find the error").click()
            await expect(page.locator(".plan li.done")).to_have_text("Look done")

            await page.get_by_role("link", name="lane cron").click()

            await expect(page.locator(".session-head .id")).to_have_text(lane)


async def test_a_refused_message_stays_with_the_reason_and_is_sent_again_under_its_key(tmp_path: Path) -> None:
    answers = [(503, "unavailable"), (429, "inbox_full"), (403, "forbidden"), (409, "session_not_active")]
    keys: list[str] = []

    async def refuse(route: Route) -> None:
        status, code = answers[len(keys)]
        keys.append(json.loads(route.request.post_data or "")["dispatchId"])
        body = json.dumps({"code": code, "error": f"the API says {code}", "ok": False})
        await route.fulfill(status=status, content_type="application/json", body=body)

    async with serving(tmp_path) as api:
        session_id = (await api.create("hello"))["sessionId"]
        await api.emit(session_id, *turn_events(0))
        async with console(api.url, f"#/sessions/{session_id}") as tabs:
            page = tabs.first
            await page.route("**/v1/dispatches", refuse)
            field = page.get_by_label("Message", exact=True)
            await field.fill("hear me")
            for sentence in (
                "cannot reach its store",
                "Too much waits there",
                "not for this key",
                "session_not_active",
            ):
                await page.get_by_role("button", name="Send").click()
                await expect(page.get_by_role("alert")).to_contain_text(sentence)
                await expect(field).to_have_value("hear me")

    assert len(set(keys)) == 1


async def test_the_text_of_a_step_that_began_at_the_end_of_a_page_is_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session_id = (await api.create("hello"))["sessionId"]
        # 166 turns have 996 events beside pieces; a page has 1,000, and the step begins with the last of them.
        await api.emit(session_id, *(event for turn in range(166) for event in turn_events(turn)))
        again = received(166, "second").model_copy(update={"key": names.turn_key(166, "message/1")})
        await api.emit(session_id, of_turn(166, "started", EventType.TURN_STARTED), received(166, "first"), again)
        await api.emit(
            session_id,
            step(166, 0, "started", EventType.STEP_STARTED),
            step(166, 0, "reasoning", EventType.REASONING_COMPLETED, reasoning="hm"),
            text_delta(166, 0, 0, "half a "),
            text_delta(166, 0, 1, "sentence"),
        )
        async with console(api.url, f"#/sessions/{session_id}") as tabs:
            await expect(tabs.first.locator(".said.live .clipped")).to_have_text("half a sentence")
            await expect(tabs.first.get_by_role("group", name="Messages").get_by_text("second")).to_have_count(1)
