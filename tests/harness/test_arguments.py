"""What an approval is asked about, agreed to and remembered for is what runs."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, cast

import pytest
from pydantic import BaseModel, BeforeValidator, Field, SecretStr
from pydantic_ai.messages import ModelResponse, ToolCallPart

from perdure import Agent, Call, Decision, SessionView, tool
from perdure.protocol.inputs import digest
from perdure.testing import Played, ScriptedModel, call, play
from tests.support.lab import YES, lab


class Ledger:
    """What ran, and what the author's functions saw before."""

    def __init__(self) -> None:
        self.refunds: list[float] = []
        self.seen: list[Any] = []

    def tool(self, **options: Any) -> Any:
        def by_amount(call: Call, session: SessionView) -> bool:
            self.seen.append(call.arguments)
            return call.arguments["amount"] > 20

        declared: dict[str, Any] = {"approval": by_amount, **options}

        @tool(name="refund", **declared)
        def refund(amount: float = 500.0) -> str:
            """Refund."""
            self.refunds.append(amount)
            return f"refunded {amount:g}"

        return refund


async def run(declared: Any, *replies: Any) -> Played:
    return await play(Agent("clerk", tools=[declared]), "Go", model=ScriptedModel([*replies, "Done."]))


async def test_an_approval_sees_the_defaults_of_what_the_model_left_out() -> None:
    ledger = Ledger()

    played = await run(ledger.tool(), call("refund"))

    (request,) = played.pending
    assert (request.input, request.digest) == ({"amount": 500.0}, digest({"amount": 500.0}))
    assert ledger.seen == [{"amount": 500.0}]
    await played.answer("refund", "approve")
    assert ledger.refunds == [500.0]


async def test_a_default_that_does_not_fit_its_own_type_hides_no_other_one() -> None:
    seen: list[Any] = []

    def large(call: Call, session: SessionView) -> bool:
        seen.append(call.arguments)
        return True

    @tool(approval=large)
    def refund(amount: float = 500.0, note: str = cast("Any", None), at: datetime = datetime(2026, 1, 2)) -> str:
        """Refund."""
        return f"refunded {amount:g} {note} {at.year}"

    played = await run(refund, call("refund", at="2027-03-04T05:06"))

    (request,) = played.pending
    shown = {"amount": 500.0, "at": "2027-03-04T05:06:00"}
    assert (request.input, request.digest) == (shown, digest(shown))
    assert (seen[0]["amount"], seen[0]["note"]) == (500.0, None)
    played = await played.answer("refund", "approve")
    assert [each.output for each in played.tool_calls] == ["refunded 500 None 2027"]


async def test_an_approval_sees_the_values_that_the_tool_will_get() -> None:
    ledger = Ledger()

    played = await run(ledger.tool(), [call("refund", amount="50"), call("refund", amount="5")])

    assert [request.input for request in played.pending] == [{"amount": 50.0}]
    assert ledger.seen == [{"amount": 50.0}, {"amount": 5.0}]
    assert ledger.refunds == [5.0]


async def test_a_summary_and_a_key_see_them_too() -> None:
    seen: list[Any] = []

    def note(arguments: Any) -> str:
        seen.append(arguments)
        return "noted"

    played = await run(Ledger().tool(approval="once", approval_key=note, summary=note), call("refund"))

    assert seen == [{"amount": 500.0}, {"amount": 500.0}]
    assert played.pending[0].summary == "noted"


async def test_what_was_approved_runs_although_the_default_has_changed_since() -> None:
    ledger = Ledger()
    async with lab([call("refund")], ledger.tool(), can_ask=True) as it:
        open = await it.parked(await it.deliver("Go"))

        @tool(name="refund", approval="always")
        def refund(amount: float = 9000.0) -> None:
            ledger.refunds.append(amount)

        it.redeclare(refund)
        resumed = await it.resume(await it.answer((open[0], YES)), open=open)
        await it.run_approved(resumed.calls[0])

    assert ledger.refunds == [500.0]


class Place(BaseModel):
    street: Annotated[str, Field(alias="roadName")]
    number: int = 1


async def test_values_are_of_the_declared_types_and_models_are_dicts() -> None:
    seen: list[Any] = []

    def decide(call: Call, session: SessionView) -> bool:
        seen.append(call.arguments)
        return False

    @tool(approval=decide)
    def move(to: Place, at: datetime, price: Decimal, pin: SecretStr) -> str:
        """Move."""
        return f"{to.street} {at.year} {price} {pin.get_secret_value()}"

    sent = {"to": {"roadName": "Elm"}, "at": "2026-01-02T03:04:05Z", "price": "9.50", "pin": "1234"}
    played = await run(move, call("move", **sent))

    (arguments,) = seen
    assert arguments["to"] == {"roadName": "Elm", "number": 1}
    assert (arguments["at"].year, arguments["price"], str(arguments["pin"])) == (2026, Decimal("9.50"), "*" * 10)
    # A secret has no JSON that reads back as the same: it is run as it was sent.
    assert played.tool_calls[0].output == "Elm 2026 9.50 1234"
    assert played.tool_calls[0].input == {**sent, "to": {"roadName": "Elm", "number": 1}}


@pytest.mark.parametrize("broken", ["approval", "summary", "approval_key"])
async def test_what_raises_there_refuses_and_leaves_a_traceback(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("customer")

    ledger = Ledger()
    options: dict[str, Any] = {"approval": "once" if broken == "approval_key" else "always", broken: fails}

    with caplog.at_level(logging.ERROR, "perdure.tools"):
        played = await run(ledger.tool(**options), call("refund"))

    assert ([each.status for each in played.tool_calls], ledger.refunds) == (["rejected"], [])
    (line,) = caplog.records
    ids = {name: getattr(line, name) for name in ("session_id", "turn", "step", "call_id", "tool")}
    assert ids == {"session_id": "session", "turn": 0, "step": 0, "call_id": "call_0_0", "tool": "refund"}
    assert "KeyError: 'customer'" in caplog.text
    assert "in fails" in caplog.text


def always(decision: Decision) -> Callable[[Call, SessionView], Decision]:
    return lambda _, __: decision


@pytest.mark.parametrize(
    "odd",
    [
        {"approval": "always", "summary": len},
        {"approval": always(Decision.ask(cast("Any", 5)))},
        {"approval": always(Decision(cast("Any", "perhaps")))},
        {"approval": "once", "approval_key": len},
        # Its text is its address in memory, which another object may have later.
        {"approval": "once", "approval_key": lambda _: object()},  # type: ignore[misc]
    ],
)
async def test_what_is_no_text_there_refuses_the_call_alone(odd: dict[str, Any]) -> None:
    ledger = Ledger()

    played = await run(ledger.tool(**odd), call("refund"))

    assert ([each.status for each in played.tool_calls], ledger.refunds) == (["rejected"], [])
    assert played.text == "Done."


@pytest.mark.parametrize("broken", ["approval", "summary", "approval_key"])
@pytest.mark.parametrize("end", [SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_a_function_that_would_end_its_worker_refuses_the_call(broken: str, end: BaseException) -> None:
    def ends(*_: Any) -> Any:
        raise end

    ledger = Ledger()
    options: dict[str, Any] = {"approval": "once" if broken == "approval_key" else "always", broken: ends}

    played = await run(ledger.tool(**options), call("refund"))

    assert ([each.status for each in played.tool_calls], ledger.refunds) == (["rejected"], [])
    assert type(end).__name__ in played.tool_calls[0].output
    assert played.text == "Done."


def leave(_: Any) -> Any:
    raise SystemExit(3)


async def test_a_type_that_would_end_its_worker_makes_the_reply_unusable() -> None:
    @tool
    def pay(amount: Annotated[int, BeforeValidator(leave)]) -> None:
        """Pay."""

    played = await run(pay, call("pay", amount=5))

    (failed,) = (event.data or {} for event in played.events if event.type == "turn.failed")
    assert failed["code"] == "MODEL_REPLY_UNUSABLE"


async def test_the_functions_about_an_approval_may_be_async() -> None:
    async def decide(call: Call, session: SessionView) -> bool:
        return True

    async def describe(arguments: Any) -> str:
        return f"Refund {arguments['amount']:g}"

    decided = await run(Ledger().tool(approval=decide, summary=describe), call("refund"))
    remembered = await run(Ledger().tool(approval="once", approval_key=describe), call("refund"))

    assert [request.summary for request in decided.pending] == ["Refund 500"]
    assert len(remembered.pending) == 1


async def test_an_approval_under_an_async_key_is_remembered_for_that_key_alone() -> None:
    async def account(arguments: Any) -> str:
        return arguments["account"]

    declared = tool(name="transfer", approval="once", approval_key=account)(transfer.function)
    later = [call("transfer", account=account) for account in ("good", "evil", "worse")]

    played = await run(declared, call("transfer", account="good"), later)
    played = await played.answer("transfer", "approve")

    assert [each.output for each in played.tool_calls] == ["sent to good", "sent to good"]
    assert [request.input for request in played.pending] == [{"account": "evil"}, {"account": "worse"}]


async def test_an_approval_with_changed_arguments_is_remembered_under_an_async_key_too() -> None:
    async def account(arguments: Any) -> str:
        return arguments["account"]

    declared = tool(name="transfer", approval="once", approval_key=account)(transfer.function)

    played = await run(declared, *[call("transfer", account=account) for account in ("evil", "good", "evil")])
    played = await played.answer("transfer", "approve", arguments={"account": "good"})

    assert [each.output for each in played.tool_calls] == ["sent to good", "sent to good"]
    assert [request.input for request in played.pending] == [{"account": "evil"}]


@tool(approval="once", approval_key=lambda arguments: arguments["account"])
def transfer(account: str) -> str:
    """Transfer."""
    return f"sent to {account}"


async def test_an_approval_with_changed_arguments_is_remembered_for_those() -> None:
    calls = [call("transfer", account=account) for account in ("evil", "good", "evil")]

    played = await run(transfer, *calls)
    played = await played.answer("transfer", "approve", arguments={"account": "good"})

    assert [each.output for each in played.tool_calls] == ["sent to good", "sent to good"]
    assert [request.input for request in played.pending] == [{"account": "evil"}]


async def test_an_approval_whose_key_cannot_be_made_is_not_remembered(caplog: pytest.LogCaptureFixture) -> None:
    def strict(arguments: Any) -> str:
        return {"a": "known"}[arguments["account"]]

    declared = tool(name="transfer", approval="once", approval_key=strict)(transfer.function)
    played = await run(declared, call("transfer", account="a"), call("transfer", account="a"))

    played = await played.answer("transfer", "approve", arguments={"account": "b"})

    assert [each.output for each in played.tool_calls] == ["sent to b"]
    assert len(played.pending) == 1
    assert "this approval cannot be remembered" in caplog.text


@pytest.mark.parametrize("sent", ['{"account": "\\ud800"}', "[" * 100_000, '"good"', "{"])
async def test_invalid_arguments_are_reported_to_the_model(sent: str) -> None:
    reply = ModelResponse(parts=[ToolCallPart("transfer", sent, tool_call_id="c")])
    model = ScriptedModel([reply, "Sorry."])

    played = await play(Agent("clerk", tools=[transfer]), "Go", model=model)

    assert played.text == "Sorry."
    (result,) = model.prompts[1].messages[-1].parts
    assert str(result.content).startswith("Invalid arguments for transfer: ")  # type: ignore[union-attr]


async def test_very_many_problems_are_counted_and_not_listed() -> None:
    @tool
    def add(numbers: list[int]) -> int:
        """Add them up."""
        return sum(numbers)

    model = ScriptedModel([call("add", numbers=["one"] * 5_000), "Sorry."])

    await play(Agent("clerk", tools=[add]), "Go", model=model)

    (result,) = model.prompts[1].messages[-1].parts
    said = str(result.content)  # type: ignore[union-attr]
    assert said.startswith("Invalid arguments for add: numbers.0: Input should be a valid integer")
    assert said.endswith("4985 more problems")
    assert len(said) < 2_000


async def test_the_calls_of_one_reply_have_a_bound_on_their_arguments_together() -> None:
    @tool
    def note(text: str) -> int:
        """Note it."""
        return len(text)

    half = 600_000
    sent = [ToolCallPart("note", f'{{"text": "{"x" * size}"}}', tool_call_id=str(size)) for size in (half, half + 1, 3)]
    model = ScriptedModel([ModelResponse(parts=sent, finish_reason="tool_call"), "Done."])

    await play(Agent("clerk", tools=[note]), "Go", model=model)

    results: list[Any] = [part.content for part in model.prompts[1].messages[-1].parts]  # type: ignore[union-attr]
    first, second, third = results
    assert (first, third) == (half, 3)
    assert second == (
        "Invalid arguments for note: too large. "
        "The calls of one reply have at most 1048576 characters of arguments together."
    )
