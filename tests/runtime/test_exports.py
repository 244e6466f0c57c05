"""Exports: what a file holds, what is refused, and that the model cannot tell the imported session from the first."""

import asyncio
import hashlib
import json
import subprocess
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.agents.state import State
from perdure.dev.supervisor import command
from perdure.errors import Conflict, ForkRefused, Invalid, SessionNotFound
from perdure.harness.tools.approvals import REMEMBERED_APPROVALS, remembered
from perdure.protocol.deliveries import Principal
from perdure.runtime.forks import ForkPlace, Forks, export_session, import_session
from perdure.runtime.signals import Signals
from perdure.store import lifecycle as files
from perdure.store.base import Store
from perdure.store.lifecycle import Keep, NewFork
from perdure.store.open import open_store
from perdure.store.values import Commit, SessionQuery, SessionRow, Slot, SlotWrite
from perdure.testing import call
from tests.runtime.fake_driver import FakeDriver
from tests.support import given
from tests.support.lab import SESSION, lab
from tests.support.plugin import StackFactory
from tests.support.stack import Stack

Lines = list[dict[str, Any]]


async def exported(store: Store, session_id: str = SESSION) -> Lines:
    return [json.loads(line) async for line in export_session(store, session_id)]


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def target(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Store]:
    """An empty store of another deployment."""
    on_postgres = request.param == "postgres"
    url = request.getfixturevalue("postgres_url") if on_postgres else f"sqlite:///{tmp_path / 'target.db'}"
    store = await open_store(url)
    await store.migrate()
    yield store
    await store.close()


async def imported(store: Store, path: Path, *, principal: Principal | None = None, again: bool = False) -> SessionRow:
    return await import_session(store, Signals(store, FakeDriver()), b"secret", path, principal=principal, again=again)


async def nothing(store: Store) -> bool:
    return not (await store.sessions(SessionQuery())).sessions


async def test_an_export_is_imported_as_it_was(target: Store, tmp_path: Path) -> None:
    async with lab(["Hello", "Again", call("roll")]) as it:
        await it.model(await it.deliver("Hi, café \ud800"))
        for number in (1, 2):
            await it.store.commit(Commit(SESSION, slots=[SlotWrite("cart", {"n": number})]))
        await it.model(await it.deliver("And \0?"), turn=1)
        # This one runs, and has written to the state.
        await it.model(await it.deliver("Roll"), turn=2)
        await it.store.commit(Commit(SESSION, slots=[SlotWrite("cart", {"n": 3}), SlotWrite("name", {})]))
        lines = await exported(it.store)
        path = tmp_path / "export.jsonl"
        path.write_bytes(b"".join([line async for line in export_session(it.store, SESSION)]))
        first = [record for record in await it.store.records(SESSION) if record.turn < 2]

    row = await imported(target, path)

    assert [line["kind"] for line in lines] == ["session", "slot", *["record"] * len(first), "end"]
    # The turn that runs is not exported.
    assert (row.turns, row.status, row.events) == (2, "waiting", 1)
    assert (await target.slots(row.session_id, ["cart", "name"])) == {"cart": Slot("cart", {"n": 2}, 2)}
    found = await target.records(row.session_id)
    assert [(each.turn, each.step, each.key, each.format, each.body) for each in found] == [
        (each.turn, each.step, each.key, each.format, each.body) for each in first
    ]
    (event,) = await target.events(row.session_id)
    assert (event.type, event.data) == (
        "session.imported",
        {"turns": 2, "exportId": json.loads(path.read_bytes().splitlines()[0])["exportId"]},
    )


async def test_state_as_deep_as_a_tool_can_write_is_imported(target: Store, tmp_path: Path) -> None:
    state: State[Any] = State("deep", Any, default=dict)
    value = state.stored(nested(245))  # pyright: ignore[reportPrivateUsage]
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        await it.store.commit(Commit(SESSION, slots=[SlotWrite("deep", value)]))
        path = write(tmp_path / "export.jsonl", await exported(it.store))

    row = await imported(target, path)

    assert (await target.slots(row.session_id, ["deep"]))["deep"].value == value


async def test_no_token_is_exported(tmp_path: Path) -> None:
    async with lab(["Hello", "Again"]) as it:
        await it.model(await it.deliver("Hi"))
        text = json.dumps(await exported(it.store))

        token_hash = await it.store.token_of(SESSION)

    assert token_hash is not None
    assert token_hash not in text
    assert "tokenHash" not in text


async def test_a_file_is_imported_once(target: Store, tmp_path: Path) -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        path = write(tmp_path / "export.jsonl", await exported(it.store))
    first = await imported(target, path)

    with pytest.raises(Conflict, match=first.session_id):
        await imported(target, path)
    second = await imported(target, path, again=True)

    assert len((await target.sessions(SessionQuery())).sessions) == 2
    assert len(await target.records(second.session_id)) == len(await target.records(first.session_id))


async def test_a_file_without_its_earlier_turns_is_refused(target: Store, tmp_path: Path) -> None:
    async with lab(["Hello", "Again"]) as it:
        await it.model(await it.deliver("Hi"))
        await it.model(await it.deliver("And"), turn=1)
        lines = await exported(it.store)
    left = [line for line in lines if line.get("turn") != 0]
    left[-1]["records"] = len(left) - 2

    with pytest.raises(Invalid, match="has the records of 1 of 2 turns"):
        await imported(target, write(tmp_path / "export.jsonl", sealed(left)))

    assert await nothing(target)
    # Older versions gave a number to a turn without events; the session that was exported had none of its records.
    left[-1]["silent"] = [0]
    await imported(target, write(tmp_path / "silent.jsonl", sealed(left)))


async def test_a_session_whose_records_have_expired_is_neither_exported_nor_forked() -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        before = await given.read_session(it.store, SESSION)
        await it.store.commit(given.closing(SESSION))
        exporting = export_session(it.store, SESSION)
        await anext(exporting)
        await it.store.expire(Keep(records=-60.0), None, 10)

        with pytest.raises(Invalid, match="expired meanwhile"):
            [line async for line in exporting]
        with pytest.raises(Invalid, match="have expired"):
            await exported(it.store)
        forks = Forks(it.store, Signals(it.store, FakeDriver()), b"secret")
        for row in (await given.read_session(it.store, SESSION), before):
            with pytest.raises(ForkRefused):
                await forks.fork(row, ForkPlace(0), row.principal, None)


def truncated(lines: Lines) -> Lines:
    return lines[:-1]


def repeated(lines: Lines) -> Lines:
    return [*lines, *lines]


def repeated_record(lines: Lines) -> Lines:
    return [*lines[:2], lines[1], *lines[2:]]


def changed(lines: Lines) -> Lines:
    return [lines[0], {**lines[1], "body": {}}, *lines[2:]]


def missing_record(lines: Lines) -> Lines:
    return [lines[0], *lines[2:]]


def future(lines: Lines) -> Lines:
    return [{**lines[0], "version": 99}, *lines[1:]]


def future_record(lines: Lines) -> Lines:
    return sealed([lines[0], {**lines[1], "format": "perdure/delivery/99"}, *lines[2:]])


def unknown_record(lines: Lines) -> Lines:
    return sealed([lines[0], {**lines[1], "format": "perdure/telepathy/1"}, *lines[2:]])


def unended(lines: Lines) -> Lines:
    """Without the reply, with which the turn ended."""
    kept = [line for line in lines if line.get("key") != "reply"]
    return sealed([*kept[:-1], {**kept[-1], "records": len(kept) - 2}])


def sealed(lines: Lines) -> Lines:
    """With a digest that fits."""
    body = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines[:-1])
    return [*lines[:-1], {**lines[-1], "sha256": hashlib.sha256(body.encode()).hexdigest()}]


def foreign(lines: Lines) -> Lines:
    return [{"hello": "world"}, *lines[1:]]


def unknown_kind(lines: Lines) -> Lines:
    return [lines[0], {"kind": "wish"}, *lines[1:]]


def with_slot(name: str, value: Any) -> Callable[[Lines], Lines]:
    def spoilt(lines: Lines) -> Lines:
        slot = {"kind": "slot", "name": name, "value": value, "version": 1}
        return sealed([lines[0], slot, *lines[1:-1], {**lines[-1], "slots": 1}])

    return spoilt


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def deep(lines: Lines) -> Lines:
    """With a reply that nobody could serialise."""
    reply = {**lines[-2], "body": {**lines[-2]["body"], "response": {"parts": nested(900)}}}
    return sealed([*lines[:-2], reply, lines[-1]])


def crowded(lines: Lines) -> Lines:
    return sealed([lines[0], {**lines[1], "body": {"values": [[]] * 1_000_000}}, *lines[2:]])


def leaving_out(*ranges: tuple[int, int]) -> Callable[[Lines], Lines]:
    return lambda lines: sealed([{**lines[0], "leftOut": ranges}, *lines[1:]])


BAD = [
    (with_slot("perdure.approvals", {"keys": 5}), "approvals cannot be read"),
    (with_slot("perdure.approvals", {}), "approvals cannot be read"),
    (with_slot("perdure.approvals", {"version": 99, "keys": []}), "version 99"),
    (with_slot("cart", {"n": nested(300)}), "line 2 is nested deeper"),
    (deep, "nested deeper than"),
    (crowded, "line 2 has too many values"),
    (leaving_out((0, 10**18)), "line 1 cannot be read"),
    (leaving_out((-1, 1)), "line 1 cannot be read"),
    (leaving_out((1, 1)), "line 1 cannot be read"),
    (leaving_out((0, 1), (0, 1)), "line 1 cannot be read"),
    (truncated, "is incomplete"),
    (repeated, "goes on after its end"),
    (repeated_record, "line 3 repeats another one"),
    (changed, "was changed|cannot be read"),
    (missing_record, "was changed"),
    (future, "has version 99 of the format"),
    (future_record, "cannot be read by this version"),
    (unknown_record, "cannot be read by this version"),
    (unended, "cannot continue after its last turn"),
    (foreign, "is no export of a session"),
    (unknown_kind, "line 2 has no kind"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD)
async def test_a_bad_file_is_refused_and_leaves_nothing(
    target: Store, tmp_path: Path, spoil: Callable[[Lines], Lines], message: str
) -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        path = write(tmp_path / "export.jsonl", spoil(await exported(it.store)))

    with pytest.raises(Invalid, match=message):
        await imported(target, path)

    assert await nothing(target)


async def test_a_line_without_an_end_is_not_read_whole(
    target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        path = write(tmp_path / "export.jsonl", await exported(it.store))
    monkeypatch.setattr(files, "_LONGEST_LINE", 40)

    with pytest.raises(Invalid, match="line 1 is longer than 40 bytes"):
        await imported(target, path)

    assert await nothing(target)


async def test_another_owner_does_not_inherit_what_was_approved_once(target: Store, tmp_path: Path) -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        approved = SlotWrite(REMEMBERED_APPROVALS, {"keys": ["pay"]})
        await it.store.commit(Commit(SESSION, slots=[approved, SlotWrite("cart", {"n": 1})]))
        path = write(tmp_path / "export.jsonl", await exported(it.store))
        owner = (await given.read_session(it.store, SESSION)).principal

    same = await imported(target, path)
    other = await imported(target, path, principal=given.BOB, again=True)
    # Named by an operator, the same owner may have other attributes.
    named = owner.model_copy(update={"attributes": {"team": "a"}})
    again = await imported(target, path, principal=named, again=True)

    assert (await remembered(target, other.session_id)) == (frozenset(), 0)
    assert other.principal == given.BOB
    assert list(await target.slots(other.session_id, ["cart"])) == ["cart"]
    for row in (same, again):
        assert (await remembered(target, row.session_id))[0] == {"pay"}


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[]\n", b"\xff\xfe\n", b"{" * 100_000 + b"\n"])
async def test_another_file_is_refused(target: Store, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)

    with pytest.raises(Invalid):
        await imported(target, path)

    assert await nothing(target)


async def test_a_cut_line_is_refused(target: Store, tmp_path: Path) -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        path = write(tmp_path / "export.jsonl", await exported(it.store))
    whole = path.read_bytes()

    for size in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(Invalid):
            await imported(target, path)

    assert await nothing(target)


async def test_a_fork_exports_the_turns_that_it_sees() -> None:
    async with lab(["Hello", "Other", "Again"]) as it:
        await it.model(await it.deliver("Hi"))
        await it.model(await it.deliver("No"), turn=1)
        await it.store.fork(NewFork("f", "token of f", SESSION, 0))

        lines = await exported(it.store, "f")

    assert lines[0]["turns"] == 1
    assert {line["turn"] for line in lines if line["kind"] == "record"} == {0}
    assert not any(line["format"].startswith("perdure/fork") for line in lines if line["kind"] == "record")


async def test_a_session_without_a_turn_and_an_unknown_one_are_not_exported() -> None:
    async with lab(["Hello"]) as it:
        await it.deliver("Hi")

        with pytest.raises(Invalid):
            await exported(it.store)
        with pytest.raises(SessionNotFound):
            await exported(it.store, "unknown")


async def perdure(stack: Stack, *words: str) -> bytes:
    done = await asyncio.to_thread(
        subprocess.run, command(*words), env=stack.environment, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("control", [None, "clear", "compact"])
async def test_the_imported_session_sends_the_same_request(
    make_stack: StackFactory, tmp_path: Path, control: str | None
) -> None:
    stack = make_stack(provider=True, agents="tests.runtime.served:chat")
    file = tmp_path / "session.jsonl"
    async with stack.talk() as talk, stack.talk() as again:
        await talk.say('think Hm; call add {"a": 1, "b": 2} then say three')
        await talk.say("say and a half")
        if control:
            cleared = await talk.http.post(f"/eve/v1/session/{talk.session_id}/{control}", json={})
            assert cleared.is_success, cleared.text
            await talk.until_boundary()
        file.write_bytes(await perdure(stack, "sessions", "export", talk.session_id))

        again.session_id, again.token = (
            (await perdure(stack, "sessions", "import", str(file), "--token")).decode().split()
        )
        await again.say("say on")
        await talk.say("say on")
        requests = (await again.http.get(f"{stack.provider_url}/requests")).json()["requests"][-2:]
        events = (await again.http.get(f"/v1/sessions/{again.session_id}")).json()

    assert requests[0]["digest"] == requests[1]["digest"]
    assert ("call add" in str(requests[0]["texts"])) == (control is None)
    assert events["counts"]["turns"] == 3
