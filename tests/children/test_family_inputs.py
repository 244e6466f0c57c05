"""What children ask people: it is shown and answered where the family began."""

from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types
from tests.support.waiting import until

from .test_subagents import hand, of_type

PAY = 'call pay {"amount": 5}'


async def asked(talk: Talk, message: str) -> tuple[list[Json], list[Json]]:
    """The events until the session waits for people, and the requests that were shown."""
    await talk.create(message)
    events = await talk.until_boundary()
    return events, requests_in(events)


def requests_in(events: list[Json]) -> list[Json]:
    """The requests that were shown, each once: one that is open still is shown again when the next turn parks."""
    shown = [request for each in of_type(events, "input.requested") for request in each["requests"]]
    return list({request["requestId"]: request for request in shown}.values())


def approve(*requests: Json) -> list[Json]:
    return [{"requestId": each["requestId"], "optionId": "approve"} for each in requests]


async def test_what_a_child_asks_is_shown_and_answered_in_the_session_of_its_root(talk: Talk) -> None:
    events, (request,) = await asked(talk, hand(("clerk", PAY)) + " then say Done")

    assert types(events)[-3:] == ["input.requested", "turn.completed", "session.waiting"]
    (called,) = of_type(events, "subagent.called")
    details = of_type(events, "input.requested")[0]["details"][request["requestId"]]
    assert (details["sessionId"], details["agent"]) == (called["childSessionId"], "clerk")
    answer = await talk.send(inputResponses=approve(request))
    assert answer["sessionId"] == talk.session_id
    more = await talk.until_boundary()
    assert [each for each in types(more) if not each.endswith(".appended")] == [
        *("turn.started", "input.resolved", "subagent.completed", "action.result"),
        *("step.started", "message.completed", "step.completed", "turn.completed", "session.waiting"),
    ]
    assert of_type(more, "subagent.completed")[0]["output"] == "Results: paid 5"
    assert text(more) == "Done"


async def test_a_request_from_any_depth_is_listed_once(talk: Talk) -> None:
    _, (request,) = await asked(talk, hand(("researcher", hand(("clerk", PAY)))))

    listed = (await talk.http.get("/v1/inputs", params={"limit": 200})).json()["inputs"]

    assert [each["requestId"] for each in listed].count(request["requestId"]) == 1
    assert (await talk.http.post(f"/v1/inputs/{request['requestId']}", json={"optionId": "approve"})).is_success
    assert text(await talk.until_boundary()) == "Results: Results: Results: paid 5"


async def test_a_denied_request_is_a_result_of_the_child(talk: Talk) -> None:
    _, (request,) = await asked(talk, hand(("clerk", PAY + " then say It was denied")))

    await talk.send(inputResponses=[{"requestId": request["requestId"], "optionId": "deny"}])

    assert text(await talk.until_boundary()) == "Results: It was denied"


async def test_each_answer_of_the_root_leads_to_one_boundary_however_many_children_ask(talk: Talk) -> None:
    await talk.create(hand(("clerk", PAY), ("clerk", PAY), ("clerk", PAY)) + " then say Done")
    boundaries = 0
    requests: dict[str, Json] = {}
    answered: set[str] = set()
    while len(answered) < 3:
        events = await talk.until_boundary()
        boundaries += 1
        requests |= {each["requestId"]: each for each in requests_in(events)}
        request_id = next(each for each in requests if each not in answered)
        answered.add(request_id)
        await talk.send(inputResponses=approve(requests[request_id]))
    last = await talk.until_boundary()

    assert text(last) == "Done"
    assert len(of_type(last, "action.result")) == 3
    assert boundaries == 3
    # Nothing follows the last boundary, so that the next message is answered by its own turn.
    assert await talk.say("say Next") == "Next"


async def test_a_child_that_asks_twice_shows_its_second_request_after_the_first_answer(talk: Talk) -> None:
    _, (first,) = await asked(talk, hand(("clerk", f'{PAY} then call pay {{"amount": 6}} then say Paid')))
    await talk.send(inputResponses=approve(first))
    (second,) = requests_in(await talk.until_boundary())
    await talk.send(inputResponses=approve(second))

    assert text(await talk.until_boundary()) == "Results: Paid"


async def test_a_step_may_mix_agents_tools_and_approvals(talk: Talk) -> None:
    order = 'call add {"a": 1, "b": 2} and pay {"amount": 7} and clerk {"message": "say Hi"} then say Done'
    events, (request,) = await asked(talk, order)

    assert request["action"]["toolName"] == "pay"
    await talk.send(inputResponses=approve(request))
    more = await talk.until_boundary()
    results = {str(each["result"]["output"]) for each in of_type([*events, *more], "action.result")}
    assert results == {"3", "paid 7", "Hi"}
    assert text(more) == "Done"


async def test_an_approval_of_the_root_does_not_wait_for_its_children(talk: Talk) -> None:
    order = hand(("clerk", "drip 40 words delay 50")) + ' and pay {"amount": 7} then say Done'
    _, (request,) = await asked(talk, order)
    await talk.send(inputResponses=approve(request))

    more = await talk.until_boundary()

    assert [each["result"]["kind"] for each in of_type(more, "action.result")] == ["tool-result", "subagent-result"]
    assert text(more) == "Done"


async def test_to_cancel_a_root_withdraws_what_its_children_ask(talk: Talk) -> None:
    _, (request,) = await asked(talk, hand(("researcher", hand(("clerk", PAY)))))

    assert (await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")).json()["status"] == "accepted"
    events = await talk.until_boundary()

    assert types(events)[-2:] == ["turn.cancelled", "session.waiting"]
    row = (await talk.http.get(f"/v1/inputs/{request['requestId']}")).json()
    assert row["status"] == "withdrawn"
    assert await talk.say("say Still here") == "Still here"


async def test_an_answer_to_a_child_that_has_ended_changes_nothing(talk: Talk) -> None:
    _, (request,) = await asked(talk, hand(("clerk", PAY)))
    await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")
    await talk.until_boundary()

    answer = await talk.http.post(
        f"/eve/v1/session/{talk.session_id}",
        json={"continuationToken": talk.token, "inputResponses": approve(request)},
    )

    assert answer.is_success, answer.text
    assert answer.json()["inputs"] == [{"requestId": request["requestId"], "status": "withdrawn"}]
    assert await talk.say("say Still here") == "Still here"


async def test_the_child_of_a_task_asks_nobody(talk: Talk) -> None:
    await talk.create(hand(("clerk", PAY)) + " then say Done", mode="task")
    events = [event async for event in talk.events()]

    assert "input.requested" not in types(events)
    assert types(events)[-1] == "session.completed"


async def test_a_message_answers_the_only_question_of_a_family(talk: Talk) -> None:
    question = 'call ask_question {"prompt": "Which one?"}'
    await asked(talk, hand(("clerk", question)))

    await talk.send("the blue one")

    assert "the blue one" in text(await talk.until_boundary())


async def test_a_killed_worker_loses_no_request_of_a_child(stack: Stack, talk: Talk) -> None:
    _, (request,) = await asked(talk, hand(("clerk", PAY)) + " then say Done")
    stack.workers[-1].kill()
    stack.start_worker()
    await talk.send(inputResponses=approve(request))

    assert text(await talk.until_boundary()) == "Done"
    await until(lambda: stack.workers[-1].alive, "the worker to live")
