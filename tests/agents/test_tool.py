from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any, cast

import pytest
from pydantic import BaseModel, Field

from perdure import Agent, Durability, InvalidDeclaration, Limits, ToolContext, tool
from perdure.agents.registry import bounds_of
from perdure.protocol.deliveries import Bounds


class Item(BaseModel):
    sku: str
    count: int = 1


def test_the_schema_comes_from_signature_and_docstring() -> None:
    @tool
    def add_item(ctx: ToolContext, item: Item, note: str | None = None) -> str:
        """Put something into the cart.

        Only what is in stock.

        Args:
            item: What to add,
                and how many of it.
            note: For the packer.

        Returns:
            What is in the cart.
        """
        return item.sku

    assert add_item.name == "add_item"
    assert add_item.description == "Put something into the cart.\n\nOnly what is in stock."
    properties = add_item.schema["properties"]
    assert list(properties) == ["item", "note"]
    assert properties["item"]["description"] == "What to add, and how many of it."
    assert properties["note"]["description"] == "For the packer."
    assert add_item.schema["required"] == ["item"]
    assert add_item.schema["additionalProperties"] is False


def test_numpy_and_sphinx_docstrings_are_read_too() -> None:
    @tool
    def numpy(a: int, b: int) -> int:
        """Add.

        Parameters
        ----------
        a : int
            The first.
        b
            The second.
        """
        return a + b

    @tool
    def sphinx(a: int) -> int:
        """Add.

        :param a: The first,
            and only one.
        :returns: The sum.
        """
        return a

    assert [each["description"] for each in numpy.schema["properties"].values()] == ["The first.", "The second."]
    assert sphinx.schema["properties"]["a"]["description"] == "The first, and only one."
    assert sphinx.description == "Add."


def test_the_context_is_hidden_at_any_position() -> None:
    @tool
    def last(a: int, ctx: ToolContext | None = None) -> None: ...

    @tool
    def keyword(*, ctx: ToolContext, a: int) -> None: ...

    @tool
    def positional(ctx: ToolContext, a: int, /) -> None: ...

    assert [list(each.schema["properties"]) for each in (last, keyword, positional)] == [["a"]] * 3


def test_parameters_may_have_any_name_and_constraints() -> None:
    @tool
    def odd(schema: str, model_config: Annotated[int, Field(ge=1, description="At least one.")]) -> None: ...

    properties = odd.schema["properties"]
    assert list(properties) == ["schema", "model_config"]
    assert properties["model_config"]["minimum"] == 1
    assert properties["model_config"]["description"] == "At least one."


def test_a_tool_can_still_be_called() -> None:
    @tool(effects="pure")
    def double(n: int) -> int:
        """Double it."""
        return 2 * n

    assert double(4) == 8
    assert double.__doc__ == "Double it."


def test_a_time_limit_may_be_a_timedelta() -> None:
    @tool(timeout=timedelta(minutes=2))
    def slow() -> None: ...

    assert slow.timeout == 120.0


def test_what_cannot_be_sent_is_refused_when_it_is_declared() -> None:
    with pytest.raises(InvalidDeclaration, match="takes \\*rest"):

        @tool
        def many(*rest: int) -> None: ...

    with pytest.raises(InvalidDeclaration, match="'a' needs a type annotation"):

        @tool  # pyright: ignore[reportUnknownArgumentType]
        def untyped(a) -> None: ...  # pyright: ignore

    with pytest.raises(InvalidDeclaration, match="cannot be sent as JSON"):

        @tool
        def unsendable(a: threadlike) -> None: ...

    with pytest.raises(InvalidDeclaration, match="'Nowhere' cannot be found"):

        @tool  # pyright: ignore[reportUnknownArgumentType]
        def unknown(a: Nowhere) -> None: ...  # type: ignore  # noqa: F821

    with pytest.raises(InvalidDeclaration, match="ToolContext twice"):

        @tool
        def twice(a: ToolContext, b: ToolContext) -> None: ...


class threadlike:
    pass


def in_turn_of_nothing() -> None: ...


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"retries": 1}, "runs at most once"),
        ({"retries": -1, "effects": "pure"}, "negative"),
        ({"retries": "2", "effects": "pure"}, "whole number"),
        ({"retries": 1.5, "effects": "pure"}, "whole number"),
        ({"retries": 10**9, "effects": "pure"}, "at most 1000"),
        ({"timeout": 0}, "more than 0"),
        ({"timeout": None}, "the timeout is a number of seconds or a timedelta"),
        ({"timeout": "20"}, "the timeout is a number of seconds or a timedelta"),
        ({"timeout": float("inf")}, "at most 100 years"),
        ({"timeout": 1e15}, "at most 100 years"),
        ({"effects": "sometimes"}, "effects are"),
        ({"approval": "perhaps"}, "approval is"),
        ({"name": "no spaces"}, "tool name"),
        ({"name": 5}, "tool name"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], complaint: str) -> None:
    def anything() -> None: ...

    with pytest.raises(InvalidDeclaration, match=complaint):
        tool(**options)(anything)


def test_options_are_given_by_name() -> None:
    with pytest.raises(InvalidDeclaration, match=r"by name: `@tool\(name='pay'\)`"):
        tool("pay")  # type: ignore


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"name": 5}, "agent name"),
        ({"model": object()}, "model is a name"),
        ({"instructions": ["Be kind."]}, "instructions are text"),
        ({"instructions": lambda: "Be kind."}, "a function that takes the session"),
        ({"tools": tool(in_turn_of_nothing)}, "tools is a list"),
        ({"tools": "look_up"}, "tools is a list"),
        ({"settings": "cold"}, "settings is a dict"),
        ({"limits": {"steps_per_turn": 3}}, r"`limits=Limits\(steps_per_turn=12\)`"),
        ({"output_schema": Item}, r"Model.model_json_schema\(\)"),
    ],
)
def test_the_error_of_a_wrong_agent_explains_what_to_write_instead(fields: dict[str, Any], advice: str) -> None:
    with pytest.raises(InvalidDeclaration, match=advice):
        Agent(**cast("dict[str, Any]", {"name": "shop", **fields}))


@pytest.mark.parametrize(
    "limits",
    [
        {"steps_per_turn": "3"},
        {"steps_per_turn": True},
        {"calls_per_step": 0},
        {"parallel_calls": 501},
        {"parallel_calls": 1.5},
        {"input_tokens": "many"},
        {"output_tokens": 0},
        {"max_attempts": 0},
        {"max_deaths": 0},
    ],
)
def test_limits_are_whole_numbers(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidDeclaration, match=f"{next(iter(limits))} must be a whole number"):
        Limits(**limits)


@pytest.mark.parametrize("name", ["turn_seconds", "session_seconds", "idle_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), "60", True])
def test_limits_of_time_are_seconds(name: str, seconds: Any) -> None:
    with pytest.raises(InvalidDeclaration, match=f"{name} must be a number of seconds above 0"):
        Limits(**{name: seconds})


def test_something_must_end_the_attempts() -> None:
    with pytest.raises(InvalidDeclaration, match="max_attempts=None needs turn_seconds"):
        Limits(max_attempts=None)


def test_durability_bounds_the_attempts_and_the_time_of_a_turn() -> None:
    usual, bounded = Agent("a", durability=Durability()), Agent("a", durability=Durability(3, timedelta(minutes=5)))

    assert (usual.limits.max_attempts, usual.limits.turn_seconds) == (10, 3600)
    assert (bounded.limits.max_attempts, bounded.limits.turn_seconds) == (3, 300)
    assert bounds_of(bounded.limits) == Bounds(attempts=3, turn_seconds=300)
    # A declaration that is made of another one says the same.
    assert replace(bounded, description="Again.").limits == bounded.limits
    assert Agent("a").limits == Limits()


@pytest.mark.parametrize("limits", [Limits(max_attempts=7), Limits(turn_seconds=60)])
def test_bounds_are_said_once(limits: Limits) -> None:
    with pytest.raises(InvalidDeclaration, match="say it once"):
        Agent("a", limits=limits, durability=Durability())


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Durability(timeout=cast("Any", 60)),
        lambda: Agent("a", durability=Durability(max_attempts=0)),
        lambda: Agent("a", durability=Durability(max_attempts=None, timeout=None)),
        lambda: Agent("a", durability=cast("Any", 3)),
    ],
    ids=["seconds", "no attempt", "no bound", "a number"],
)
def test_a_durability_that_cannot_work_is_refused(declare: Callable[[], object]) -> None:
    with pytest.raises(InvalidDeclaration):
        declare()


def test_an_agent_takes_plain_functions_and_refuses_doubles() -> None:
    def look() -> None: ...

    agent = Agent("looker", tools=[look])

    assert [each.name for each in agent.own_tools] == ["look"]
    with pytest.raises(InvalidDeclaration, match="more than one tool named look"):
        Agent("looker", tools=[look, look])
    with pytest.raises(InvalidDeclaration, match="is not a tool"):
        Agent("looker", tools=["look"])


@pytest.mark.parametrize("name", ["", "Has Spaces", "UPPER", "-dash", "x" * 65])
def test_an_agent_needs_a_name_that_fits_everywhere(name: str) -> None:
    with pytest.raises(InvalidDeclaration, match="agent name"):
        Agent(name)


def test_importing_perdure_is_light() -> None:
    code = (
        "import sys; from perdure import Agent, Planning, State, tool; Agent('a', planning=Planning()); "
        "print([heavy for heavy in ('pydantic_ai', 'temporalio', 'fastapi', 'griffe') if heavy in sys.modules])"
    )

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"


class Shop:
    def price(self, sku: str) -> int:
        return len(sku)


async def one_by_one() -> AsyncIterator[int]:
    yield 1


def in_turn() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("declared", "advice"),
    [
        (one_by_one, "'one_by_one' yields; .*`return`"),
        (in_turn, "'in_turn' yields; .*`return`"),
        (Shop.price, "'price' is a method: .*Declare a function that calls it"),
        (Shop().price, "not a function. Declare a function that calls it"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_advice(declared: Any, advice: str) -> None:
    for declare in (tool, lambda function: Agent("shop", tools=[function])):  # type: ignore[misc]
        with pytest.raises(InvalidDeclaration, match=advice) as refused:
            declare(declared)
        assert "\n" not in str(refused.value)
