"""Every version of every durable shape that was ever shipped can be read."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.harness import journal
from perdure.harness.journal import Format
from perdure.harness.tools import approvals
from perdure.protocol.deliveries import DeliveryBody
from perdure.protocol.wire import JsonObject
from perdure.session import inputs, state
from perdure.session.state import Chain
from perdure.store.lifecycle import EXPORT_VERSION

from .fixtures import DIRECTORY, Fixture, Refused, digest, expected, kept, missing
from .sample import contains
from .shapes import BODIES, Shape, shapes

SHAPES = {shape.name: shape for shape in shapes()}
FIXTURES = [fixture for name in SHAPES for fixture in kept(DIRECTORY, name)]


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda each: f"{each.shape}-{each.path.stem}")
def test_a_shipped_fixture_is_lifted(fixture: Fixture) -> None:
    shape = SHAPES[fixture.shape]

    lifted = [shape.load(fixture.version, value) for value in fixture.stored]

    # No field of what was stored is dropped on the way.
    assert contains([bare(value) for value in lifted], [bare(value) for value in expected(fixture, shape)])


def bare(value: Any) -> Any:
    """The value without its version."""
    if not isinstance(value, dict):
        return value
    return {name: inner for name, inner in value.items() if name not in ("version", "$version")}  # type: ignore


async def test_the_fixtures_have_what_this_build_stores() -> None:
    new = await missing(list(SHAPES.values()))

    assert [str(path.relative_to(DIRECTORY)) for path in new] == [], "run `python -m tests.versions`"


def test_every_durable_shape_has_fixtures() -> None:
    formats = {value for value in vars(journal).values() if isinstance(value, Format)}
    chains = {
        value
        for module in (state, inputs, journal, approvals)
        for value in vars(module).values()
        if isinstance(value, Chain)
    }

    assert formats == set(BODIES)
    assert chains == {state.SESSION, state.SNAPSHOT, inputs.REQUEST, inputs.ANSWER, journal.BODY, approvals.REMEMBERED}
    # A directory of a shape that this build has no more would not be lifted by any test.
    assert {path.name for path in DIRECTORY.iterdir()} == set(SHAPES)


def test_what_is_stored_says_its_version() -> None:
    assert state.SessionState(session_id="s", agent="a", token_hash="t").version == state.SESSION.version
    assert state.dump_turn(state.TurnState()).version == state.SNAPSHOT.version
    assert DeliveryBody().version == journal.BODY.version
    assert SHAPES["export-header"].version == EXPORT_VERSION


# --- changes that would strand what is stored ---------------------------------------------------------------


def named(cart: JsonObject) -> JsonObject:
    """Version 2 has a name for what is in the cart."""
    return {"items": cart["content"]}


def renamed(cart: JsonObject) -> JsonObject:
    # Only the words differ.
    return {"items": cart["content"]}


def edited(cart: JsonObject) -> JsonObject:
    return {"items": cart.get("content")}


def capped(cart: JsonObject) -> JsonObject:
    return {"items": cart["content"][:_MOST]}


_MOST = 9


def a_shape(*samples: Any, migrators: Sequence[Any] = ()) -> Shape:
    async def stored() -> Sequence[Any]:
        return samples

    return Shape("cart", stored, lambda _, value: value, migrators)


async def ship(directory: Path, shape: Shape) -> list[str]:
    """Do what the command does."""
    written: list[str] = []
    while files := await missing([shape], directory):
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            written.append(path.name)
    return written


async def test_each_version_and_each_new_field_is_written_once(tmp_path: Path) -> None:
    assert await ship(tmp_path, a_shape({"content": "tea"})) == ["1.json"]
    assert await ship(tmp_path, a_shape({"content": "milk"})) == []
    assert await ship(tmp_path, a_shape({"content": "tea", "count": 1})) == ["1.2.json"]

    second = a_shape({"items": "tea"}, migrators=[named])

    assert await ship(tmp_path, second) == ["2.json", "1-to-2.json"]
    lifted = json.loads((tmp_path / "cart" / "1-to-2.json").read_text())["lifted"]
    assert lifted == [{"items": "tea"}, {"items": "tea"}]
    assert json.loads((tmp_path / "cart" / "1.json").read_text()) == [{"content": "tea"}]
    assert await missing([second], tmp_path) == {}


@pytest.mark.parametrize("now", [{}, {"items": "tea"}, {"content": 7}, {"content": None}, {"content": ["tea"]}])
async def test_a_field_that_is_gone_or_changed_without_a_new_version_is_refused(tmp_path: Path, now: Any) -> None:
    await ship(tmp_path, a_shape({"content": "tea"}))

    with pytest.raises(
        Refused, match=r"cart: version 1 was shipped with .*content: str.*raise the version and write a"
    ):
        await missing([a_shape(now)], tmp_path)


async def test_a_shipped_migrator_that_was_edited_is_refused(tmp_path: Path) -> None:
    await ship(tmp_path, a_shape({"content": "tea"}))
    await ship(tmp_path, a_shape({"items": "tea"}, migrators=[named]))

    # It makes the same of this fixture, and perhaps something else of what sessions have stored.
    with pytest.raises(Refused, match="cart: the migrator from version 1 was shipped and has changed"):
        await missing([a_shape({"items": "tea"}, migrators=[edited])], tmp_path)


def test_the_words_of_a_migrator_may_change() -> None:
    assert digest(named) == digest(renamed)
    assert digest(named) != digest(edited)


async def test_a_shipped_migrator_whose_result_has_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ship(tmp_path, a_shape({"content": "tea"}))
    shape = a_shape({"items": "tea"}, migrators=[capped])
    await ship(tmp_path, shape)

    monkeypatch.setattr(f"{__name__}._MOST", 2)

    with pytest.raises(Refused, match="was shipped and has changed"):
        await missing([shape], tmp_path)


async def test_a_fixture_that_was_edited_is_noticed(tmp_path: Path) -> None:
    shape = a_shape({"items": "tea"}, migrators=[named])
    await ship(tmp_path, a_shape({"content": "tea"}))
    await ship(tmp_path, shape)

    (tmp_path / "cart" / "1.json").write_text('[{"content": "milk"}]')

    with pytest.raises(Refused):
        await missing([shape], tmp_path)


async def test_a_migrator_needs_a_name_of_its_own(tmp_path: Path) -> None:
    await ship(tmp_path, a_shape({"content": "tea"}))

    with pytest.raises(Refused, match="must be a function with a name of its own"):
        await missing([a_shape({"items": "tea"}, migrators=[dict[str, Any]])], tmp_path)


async def test_what_has_no_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there is no sample"):
        await missing([replace(a_shape(), name="event-of-a-new-type")], tmp_path)
