"""Records of other builds."""

import pytest

from perdure import tool
from perdure.errors import UnreadableState
from perdure.harness.journal import FAILURE, OUTCOME, Format, TurnJournal, read
from perdure.harness.tools.records import Outcome
from perdure.protocol import names
from perdure.protocol.requests import Finished
from perdure.protocol.wire import JsonObject
from perdure.session.state import Chain
from perdure.store.values import Commit, NewRecord
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab, lab


@tool
def act() -> str:
    return "done"


def renamed(body: JsonObject) -> JsonObject:
    return {**body, "output": body["result"]}


async def write(it: Lab, key: str, form: str, body: JsonObject) -> None:
    """Write a record as another build does."""
    await it.store.commit(Commit(SESSION, records=(NewRecord(turn=0, step=0, key=key, format=form, body=body),)))


def test_a_record_is_lifted_from_the_version_that_its_format_names() -> None:
    form = Format("perdure/outcome", [renamed])
    record = NewRecord(0, 0, "call/c", "perdure/outcome/1", {"status": "completed", "result": 7})

    assert read(record, form, Outcome).output == 7
    assert form.current == "perdure/outcome/2"


@pytest.mark.parametrize(
    "form", ["perdure/outcome/2", "perdure/outcome/0", "perdure/outcome/x", "perdure/outcome", "perdure/intent/1", ""]
)
def test_a_record_of_another_format_or_of_a_newer_version_is_refused(form: str) -> None:
    with pytest.raises(UnreadableState):
        read(NewRecord(0, 0, "call/c", form, {"status": "completed"}), OUTCOME, Outcome)


@pytest.mark.parametrize("form", ["pydantic-ai/3", "perdure/failure/2", "perdure/park/2", "perdure/unheard-of/1"])
async def test_a_reply_that_a_newer_build_has_recorded_is_left_to_it_and_not_paid_again(form: str) -> None:
    async with lab(["One.", "Two."]) as it:
        ref = await it.deliver("Go")
        await write(it, names.REPLY, form, {"later": True})

        with pytest.raises(UnreadableState):
            await it.model(ref)

        assert "message.appended" not in await it.types()


async def test_an_outcome_that_a_newer_build_has_recorded_is_left_to_it_and_not_produced_again() -> None:
    async with lab([call("act")], act) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        await write(it, names.outcome_key(ref.call_id), "perdure/outcome/2", {"later": True})

        with pytest.raises(UnreadableState):
            await it.tool(ref)

        assert await it.emitted("action.result") == []


async def test_a_turn_that_an_older_build_has_recorded_continues_with_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ScriptedModel([call("act"), "Done."])
    async with lab(model, act) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        await it.tool(ref)

        # The newer build has another format of outcomes.
        monkeypatch.setattr(OUTCOME, "chain", Chain("outcome", [lambda body: {**body, "output": "lifted"}]))

        assert isinstance(await it.model(step=1), Finished)

    assert "lifted" in str(model.prompts[-1].messages[-1])


def test_a_kind_of_records_that_only_newer_builds_have_does_not_hide_the_others() -> None:
    failed = NewRecord(0, 0, "end", FAILURE.current, {"failure": {"code": "X", "message": "…"}})
    later = NewRecord(0, 0, "later", "perdure/unheard-of/1", {})

    assert TurnJournal([later, failed]).end_record == failed
