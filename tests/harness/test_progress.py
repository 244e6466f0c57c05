"""Plans, slices and checkpoints in the calls of tools, and the instructions that show them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from perdure import (
    Agent,
    CheckpointTrigger,
    Milestone,
    Plan,
    Planning,
    Progress,
    Prompt,
    Section,
    SessionView,
    Slice,
    State,
    ToolContext,
    append_all,
    replace_latest,
    replace_latest_by,
    tool,
    upsert_by,
)
from perdure.agents.progress.plan import PLAN
from perdure.errors import InvalidDeclaration, Unavailable
from perdure.harness.prompt import instructions_of
from perdure.protocol.events import EventType
from perdure.store.base import Store
from perdure.store.follow import read_all
from perdure.store.values import Commit, Committed, SlotConflict, SlotWrite
from perdure.testing import call
from tests.support.lab import SESSION, Lab, lab


@dataclass(frozen=True)
class Finding:
    source: str
    text: str


FINDINGS = Slice("findings", Finding, reducer=upsert_by(lambda finding: finding.source))
TRACE = Slice("trace", str, policy="log")
COUNT = State("progress_count", int)


async def plan(it: Lab) -> Plan | None:
    slot = (await it.store.slots(SESSION, [PLAN.name])).get(PLAN.name)
    return PLAN.read(slot.value if slot else None)


async def items(it: Lab, slice: Slice[Any]) -> tuple[Any, ...]:
    slot = (await it.store.slots(SESSION, [slice.slot])).get(slice.slot)
    return slice.read(slot.value if slot else None)


async def played(it: Lab) -> list[Any]:
    """Run the calls of the first step; returns what each of them gave the model."""
    refs = await it.calls(await it.deliver("Go"))
    for ref in refs:
        await it.tool(ref)
    return [event["result"]["output"] for event in await it.emitted(EventType.ACTION_RESULT)]


def setting_up(*titles: str) -> Any:
    return call("planning_setup_plan", objective="Ship it", initial_steps=list(titles))


# --- plans --------------------------------------------------------------------------------------------------


async def test_a_plan_completes_when_each_step_is_done() -> None:
    done = [call("planning_update_step", step_id=number, status="done") for number in (1, 2)]
    async with lab([[setting_up("a", "b"), *done]], planning=Planning()) as it:
        first, second, third = await played(it)

        assert first == {
            "objective": "Ship it",
            "status": "active",
            "steps": [
                {"stepId": 1, "title": "a", "status": "pending"},
                {"stepId": 2, "title": "b", "status": "pending"},
            ],
        }
        assert [each["status"] for each in second["steps"]] == ["done", "pending"]
        assert third["status"] == "completed"
        told = await it.emitted(EventType.PLAN_UPDATED)
        assert [each["changed"] for each in told] == [[1, 2], [1], [2]]
        assert told[-1]["plan"] == third


async def test_steps_that_are_done_at_the_same_time_are_all_kept_and_shown() -> None:
    calls = [call("planning_update_step", step_id=number, status="done") for number in (1, 2, 3)]
    async with lab([[setting_up("a", "b", "c")], calls], planning=Planning()) as it:
        await played(it)
        refs = await it.calls(step=1)

        await asyncio.gather(*(it.tool(ref, step=1) for ref in refs))

        made = await plan(it)
        assert made is not None
        assert made.status == "completed"
        results = [event["result"]["output"] for event in await it.emitted(EventType.ACTION_RESULT)][1:]
        # Whoever is last shows what all have done.
        assert "completed" in [each["status"] for each in results]


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        ([call("planning_add_step", steps=["c"])], "There is no plan yet"),
        ([call("planning_update_step", step_id=1, status="done")], "There is no plan yet"),
        ([setting_up("a"), call("planning_update_step", step_id=7, status="done")], "its steps are: 1."),
        ([setting_up("a"), call("planning_update_step", step_id=1)], "Nothing to update"),
        ([setting_up("a"), setting_up("b")], "There is a plan that is not completed"),
        ([setting_up("a"), call("planning_add_step", steps=["x"] * 200)], "at most 200 steps"),
        ([setting_up("a" * 501)], "Invalid arguments for planning_setup_plan"),
        (
            [
                setting_up("a"),
                call("planning_update_step", step_id=1, status="done"),
                call("planning_add_step", steps=["b"]),
            ],
            "The plan is completed",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused_in_words(calls: list[Any], problem: str) -> None:
    async with lab([calls], planning=Planning()) as it:
        results = await played(it)

        assert problem in results[-1]
        assert [each["status"] for each in await it.emitted(EventType.ACTION_RESULT)][-1] == "failed"


async def test_a_completed_plan_gives_way_to_a_new_one() -> None:
    calls = [setting_up("a"), call("planning_update_step", step_id=1, status="done"), setting_up("b", "c")]
    async with lab([calls], planning=Planning()) as it:
        results = await played(it)

        assert [each["title"] for each in results[-1]["steps"]] == ["b", "c"]


async def test_what_a_newer_build_says_of_a_plan_survives_a_change() -> None:
    async with lab([[call("planning_update_step", step_id=1, status="done")]], planning=Planning()) as it:
        delivery = await it.deliver("Go")
        steps = [{"stepId": 1, "title": "a", "status": "pending", "owner": "ada"}]
        newer = {"objective": "Ship it", "status": "active", "due": "soon", "steps": steps}
        await it.store.commit(Commit(SESSION, slots=[SlotWrite(PLAN.name, {"value": newer})]))

        for ref in await it.calls(delivery):
            await it.tool(ref)

        stored = (await it.store.slots(SESSION))[PLAN.name].value
        assert stored is not None
        after = stored["value"]
        assert (after["due"], after["status"]) == ("soon", "completed")
        assert (after["steps"][0]["owner"], after["steps"][0]["status"]) == ("ada", "done")


# --- slices -------------------------------------------------------------------------------------------------


@tool(into=FINDINGS)
def look_up(source: str, text: str) -> Finding:
    return Finding(source, text)


@tool(into=FINDINGS)
def look_up_all(sources: list[str]) -> list[Finding]:
    return [Finding(source, "found") for source in sources]


@tool
async def act(ctx: ToolContext, fail: bool) -> str:
    await TRACE.append(ctx, "began")
    await COUNT.set(ctx, 1)
    await FINDINGS.add(ctx, Finding("act", "x"))
    if fail:
        raise ValueError
    return "ok"


async def test_results_are_added_to_their_slice_as_the_reducer_says() -> None:
    calls = [
        call("look_up", source="a", text="1"),
        call("look_up_all", sources=["b", "c"]),
        call("look_up", source="a", text="2"),
    ]
    async with lab([calls], look_up, look_up_all) as it:
        await played(it)

        assert await items(it, FINDINGS) == (Finding("a", "2"), Finding("b", "found"), Finding("c", "found"))


async def test_tools_that_add_to_one_slice_at_the_same_time_are_all_kept() -> None:
    calls = [call("look_up", source=str(number), text="x") for number in range(4)]
    async with lab([calls], look_up) as it:
        refs = await it.calls(await it.deliver("Go"))

        await asyncio.gather(*(it.tool(ref) for ref in refs))

        assert {each.source for each in await items(it, FINDINGS)} == {"0", "1", "2", "3"}


async def test_a_failed_tool_leaves_nothing_but_its_log() -> None:
    async with lab([[call("act", fail=True)]], act) as it:
        await played(it)

        assert await items(it, TRACE) == ("began",)
        assert await items(it, FINDINGS) == ()
        assert "progress_count" not in await it.store.slots(SESSION)


class Restarts:
    """A store that cannot be reached for one read of slots after another writer was first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._restarts = False
        self.restarted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, commit: Commit) -> Committed:
        try:
            return await self._store.commit(commit)
        except SlotConflict:
            self._restarts = True
            raise

    async def slots(self, session_id: str, names: Sequence[str] | None = None) -> Any:
        if self._restarts:
            self._restarts, self.restarted = False, self.restarted + 1
            raise Unavailable
        return await self._store.slots(session_id, names)


async def test_a_database_that_restarts_before_an_update_is_made_again_loses_nothing() -> None:
    both = asyncio.Barrier(2)

    @tool
    async def add(ctx: ToolContext, source: str) -> str:
        await FINDINGS.add(ctx, Finding(source, "x"))
        await both.wait()
        return "ok"

    async with lab([[call("add", source="a"), call("add", source="b")]], add) as it:
        refs = await it.calls(await it.deliver("Go"))
        store = Restarts(it.store)
        it.harness = it.worker(cast(Store, store))

        await asyncio.gather(*(it.tool(ref) for ref in refs))

        assert store.restarted == 1
        assert [each["status"] for each in await it.emitted(EventType.ACTION_RESULT)] == ["completed", "completed"]
        assert {each.source for each in await items(it, FINDINGS)} == {"a", "b"}


async def test_an_update_that_fails_when_it_is_made_again_leaves_the_log() -> None:
    both = asyncio.Barrier(2)

    def only_once(now: int) -> int:
        if now:
            raise ValueError
        return 1

    @tool
    async def claim(ctx: ToolContext, who: str) -> str:
        await TRACE.append(ctx, who)
        await COUNT.update(ctx, only_once)
        await both.wait()
        return "mine"

    async with lab([[call("claim", who="a"), call("claim", who="b")]], claim) as it:
        refs = await it.calls(await it.deliver("Go"))

        await asyncio.gather(*(it.tool(ref) for ref in refs))

        ends = [each["status"] for each in await it.emitted(EventType.ACTION_RESULT)]
        assert sorted(ends) == ["completed", "failed"]
        assert sorted(await items(it, TRACE)) == ["a", "b"]


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        (append_all, [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("c", 1), ("a", 3)]),
        (upsert_by(lambda pair: pair[0]), [("a", 3), ("b", 0), ("a", 3), ("c", 1)]),
        (replace_latest, [("a", 3)]),
        (replace_latest_by(lambda pair: pair[0]), [("b", 0), ("c", 1), ("a", 3)]),
    ],
)
async def test_many_items_are_added_as_one_after_the_other(reducer: Any, expected: list[Any]) -> None:
    pairs = Slice("pairs", tuple[str, int], reducer=reducer)

    @tool
    async def add(ctx: ToolContext) -> None:
        await pairs.replace(ctx, [("a", 0), ("b", 0), ("a", 1)])
        await pairs.add(ctx, ("a", 2), ("c", 1), ("a", 3))

    async with lab([call("add")], add) as it:
        await it.run_one()

        assert list(await items(it, pairs)) == expected


@pytest.mark.parametrize(
    "reducer", [append_all, upsert_by(lambda number: number), replace_latest_by(lambda number: number)]
)
async def test_a_tool_that_returns_many_items_does_not_hold_up_its_worker(reducer: Any) -> None:
    numbers, most = Slice("many_numbers", int, reducer=reducer), 100_000

    @tool(into=numbers)
    def list_all() -> list[int]:
        return list(range(most))

    async with lab([call("list_all")], list_all) as it:
        before = time.process_time()
        await it.run_one()

        assert len(await items(it, numbers)) == most
        assert time.process_time() - before < 5


# --- checkpoints --------------------------------------------------------------------------------------------

REVIEWED = Milestone("reviewed")


@tool
def review(ctx: ToolContext) -> str:
    ctx.checkpoint(REVIEWED)
    return "fine"


@pytest.mark.parametrize("when", ["yes", asyncio.sleep])
def test_a_condition_is_a_plain_function(when: Any) -> None:
    with pytest.raises(InvalidDeclaration, match="plain function"):
        CheckpointTrigger(when=when)


@pytest.mark.parametrize(
    ("trigger", "calls", "taken"),
    [
        (CheckpointTrigger(), [setting_up("a", "b")], 0),
        (CheckpointTrigger(), [setting_up("a"), call("planning_update_step", step_id=1, status="done")], 1),
        (CheckpointTrigger(events={"plan.updated"}), [setting_up("a")], 1),
        (CheckpointTrigger(events={"plan.completed"}), [setting_up("a", "b")], 0),
        (CheckpointTrigger(events=(), slices={FINDINGS}), [call("look_up", source="a", text="1")], 1),
        (CheckpointTrigger(events=(), slices={"trace"}), [call("look_up", source="a", text="1")], 0),
        (CheckpointTrigger(events=(), tools={"look_up"}), [call("look_up", source="a", text="1")], 1),
        (CheckpointTrigger(events=(), tools={"act"}), [call("act", fail=True)], 0),
        (CheckpointTrigger(events=(), when=lambda event: event.type == "action.result"), [call("review")], 1),
        (CheckpointTrigger(events=(), when=lambda event: 1 // 0 > 0), [call("look_up", source="a", text="1")], 0),
        (None, [call("review")], 1),
        (None, [call("look_up", source="a", text="1")], 0),
    ],
)
async def test_each_trigger_takes_a_checkpoint(trigger: CheckpointTrigger | None, calls: list[Any], taken: int) -> None:
    async with lab([calls], look_up, act, review, planning=Planning(), checkpoints=trigger) as it:
        await played(it)

        created = await it.emitted(EventType.CHECKPOINT_CREATED)
        assert len(created) == taken
        assert [each.checkpoint_id for each in await it.store.checkpoints.list(SESSION, 9)] == [
            each["checkpointId"] for each in reversed(created)
        ]


async def test_a_milestone_names_its_checkpoint_and_a_step_of_the_plan_its_own() -> None:
    calls = [call("review"), setting_up("a", "b"), call("planning_update_step", step_id=2, status="done")]
    async with lab([calls], review, planning=Planning()) as it:
        await played(it)

        named, of_step = await it.emitted(EventType.CHECKPOINT_CREATED)
        assert named["name"] == "reviewed"
        assert of_step["planStep"] == 2
        assert of_step["name"] is None


async def test_every_second_turn_ends_with_a_checkpoint() -> None:
    async with lab(["one", "two", "three", "four"], checkpoints=CheckpointTrigger(events=(), turns=2)) as it:
        for turn in range(4):
            await it.model(await it.deliver("Go"), turn=turn)

        assert [each["turnId"] for each in await it.emitted(EventType.CHECKPOINT_CREATED)] == ["turn_1", "turn_3"]


async def test_the_checkpoint_of_a_turn_is_told_before_its_reader_stops() -> None:
    async with lab(["one"], checkpoints=CheckpointTrigger(events=(), turns=1)) as it:
        await it.model(await it.deliver("Go"))

        types = [event.type async for event in read_all(it.store, SESSION)]
        assert types[-3:] == ["turn.completed", "checkpoint.created", "session.waiting"]


# --- instructions -------------------------------------------------------------------------------------------


async def rendered(it: Lab, prompt: Any, left: float | None = None, **options: Any) -> str:
    agent = Agent("a", instructions=prompt, **options)
    row = await it.store.session(SESSION)
    assert row is not None
    return await instructions_of(it.store, agent, SessionView(SESSION, "a", 0, 0, row.principal), left)


async def test_sections_show_the_state_of_the_session() -> None:
    def findings(session: SessionView) -> str:
        return "\n".join(each.text for each in session.items(FINDINGS))

    prompt = Prompt("Be brief.", Section("Findings", findings), Progress(), Section("Empty", ""))
    steps = [setting_up("a", "b"), call("planning_update_step", step_id=1, status="done")]
    async with lab([[call("look_up", source="a", text="tea"), *steps]], look_up, planning=Planning()) as it:
        await it.deliver("Wait")
        assert await rendered(it, prompt) == ("Be brief.\n\n# Progress\nNo progress yet. Create a plan to get started.")
        await played(it)

        text = await rendered(it, prompt)

        assert text == (
            "Be brief.\n\n# Findings\ntea\n\n# Progress\nObjective: Ship it\nCompleted:\n✓ a\nRemaining:\n- b (pending)"
        )
        assert (await rendered(it, prompt, planning=Planning("react"))).startswith(text + "\n\nFor anything that takes")
        # Rendered again, by whomever: the same.
        assert await rendered(it, prompt) == text


async def test_a_section_may_have_nothing_to_say_and_text_that_utf_8_cannot_encode() -> None:
    def nothing(session: SessionView) -> Any:
        return None

    prompt = Prompt(Section("Nothing", nothing), Section("File", lambda session: "a\udc80.txt"))
    async with lab([]) as it:
        await it.deliver("Wait")
        assert await rendered(it, prompt) == "# File\na\ufffd.txt"


async def test_a_prompt_of_summaries_shows_those() -> None:
    prompt = Prompt(Section("Rules", "a long text", summary="short"), Section("Other", "whole"), visibility="summary")
    async with lab([]) as it:
        await it.deliver("Wait")
        assert await rendered(it, prompt) == "# Rules\nshort\n\n# Other\nwhole"


async def test_the_model_is_told_when_the_deadline_is_near() -> None:
    async with lab([]) as it:
        await it.deliver("Wait")
        assert await rendered(it, "Act.", left=90.2) == (
            "Act.\n\nAbout 90 seconds are left for this turn: finish with what you have."
        )
        assert await rendered(it, "Act.", left=121.0) == "Act."
