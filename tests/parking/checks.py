"""What several cells of the table look at."""

import time

from httpx2 import Response

from tests.support.chaos.consent import seconds
from tests.support.chaos.people import cancel, response, row_of, stopped
from tests.support.chaos.scripts import say
from tests.support.talk import text
from tests.support.waiting import until

from .states import Case, log, types


async def posted(case: Case, **body: object) -> Response:
    content = {"continuationToken": case.caller.token, **body}
    return await case.caller.http.post(f"/eve/v1/session/{case.caller.session_id}", json=content)


async def reads_the_next(case: Case) -> None:
    """The session continues with the next message, and emits nothing else before."""
    case.caller.cursor = len(log(case))
    script = say()
    assert await case.caller.say(script.message) == script.answer


async def waits_for_its_turn(case: Case) -> None:
    script = say()
    await case.caller.send(script.message)
    assert case.world.times_asked(script.message) == 0
    case.world.ledger.open(case.gate)
    assert text(await case.caller.until_boundary()) == case.answer
    assert text(await case.caller.until_boundary()) == script.answer
    assert case.effects("charge") == 1


async def withdrawn(case: Case, *requests: str) -> None:
    """The request takes no answer any more, nothing has run, and the next message is consumed."""
    assert await cancel(case.caller) == "accepted"
    await stopped(case.world, case.caller)
    assert {row_of(case.world, each)["status"] for each in requests} == {"withdrawn"}
    assert types(case)[-2:] == ["turn.cancelled", "session.waiting"]
    late = await posted(
        case, inputResponses=[response(each, "approve") for each in requests if is_approval(case, each)]
    )
    assert late.status_code in (200, 400), late.text
    await case.world.settled()
    await reads_the_next(case)
    assert case.effects("pay") == 0


def is_approval(case: Case, request_id: str) -> bool:
    return case.requests.get("approval") == request_id


async def expires(case: Case) -> None:
    end = seconds(row_of(case.world, case.approval)["request"]["expiresAt"])
    await until(lambda: time.time() > end, "the time to answer to end")


def wire(case: Case) -> list[dict[str, object]]:
    """The log as a reader sees it."""
    return [{"type": event["type"], "data": event["data"]} for event in log(case)]
