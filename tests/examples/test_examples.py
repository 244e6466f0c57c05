import re
from pathlib import Path
from types import ModuleType

import pytest

from examples import approvals, desk, long_job, newsroom, nightly, reports, shop, toolset
from perdure.testing import ScriptedModel, call, play

PUBLIC = {"perdure", "perdure.client", "perdure.errors", "perdure.testing"}


@pytest.mark.parametrize(
    "example",
    [approvals, desk, long_job, newsroom, nightly, reports, shop, toolset],
    ids=lambda module: module.__name__,
)
def test_an_example_imports_only_what_authors_may_import(example: ModuleType) -> None:
    code = Path(str(example.__file__)).read_text()

    ours = set(re.findall(r"^\s*(?:from|import) (perdure[\w.]*)", code, re.MULTILINE))

    assert ours <= PUBLIC


async def test_the_shop_keeps_a_cart_and_empties_it_with_the_order() -> None:
    filling = [call("add_to_cart", sku="tea", count=2), call("add_to_cart", sku="milk")]
    model = ScriptedModel([filling, "Shall I order?", call("order"), "Done."])

    played = await play(shop.agent, "Two teas and milk", "Yes", model=model)

    assert played.tool_calls[-1].output == "Ordered for 10.20."
    assert played.state(shop.CART) == shop.Cart()


async def test_the_shop_says_what_it_does_not_have() -> None:
    model = ScriptedModel([call("add_to_cart", sku="gold"), "No gold."])

    played = await play(shop.agent, "Gold", model=model)

    assert (played.tool_calls[0].status, played.tool_calls[0].output) == ("failed", "ValueError: there is no gold")


async def test_tools_of_pydantic_ai_work_as_they_are() -> None:
    model = ScriptedModel([call("area", width=2, height=3), "Six."])

    played = await play(toolset.agent, "How large?", model=model)

    assert played.tool_calls[0].output == 6.0


async def test_refunds_run_are_asked_about_or_are_refused() -> None:
    asks = [call("refund", order="1", amount=amount) for amount in (10, 100, 5000)]
    model = ScriptedModel([asks, "Settled."])

    played = await play(approvals.agent, "My money", model=model)
    (request,) = played.pending
    played = await played.answer("refund", "approve", arguments={"order": "1", "amount": 80})

    assert (request.prompt, request.summary) == (
        "local-dev asks for 100.00 back. Agreed?",
        "Refund 100.00 for order 1",
    )
    assert [each.output for each in played.tool_calls][:2] == ["Refunded 10.00.", "Refunded 80.00."]
    assert played.tool_calls[2].status == "rejected"


async def test_an_address_that_was_changed_in_the_approval_is_not_the_one_that_goes_out_unasked() -> None:
    letters = [call("send_letter", to=to, text="Hello") for to in ("Oslo 1", "Bergen 2", "Oslo 1")]

    played = await play(approvals.agent, "Write", model=ScriptedModel([*letters, "Sent."]))
    played = await played.answer("send_letter", "approve", arguments={"to": "Bergen 2", "text": "Hello"})

    assert [each.output for each in played.tool_calls] == ["Sent 5 characters to Bergen 2."] * 2
    assert [request.input["to"] for request in played.pending] == ["Oslo 1"]


async def test_letters_to_a_known_address_go_out_without_asking() -> None:
    letters = [call("send_letter", to=to, text="Hello") for to in ("Oslo 1", "OSLO 1", "Bergen 2")]
    model = ScriptedModel([*letters, "Sent."])

    played = await play(approvals.agent, "Write", model=model)
    played = await played.answer("send_letter", "approve")

    assert [each.input["to"] for each in played.tool_calls] == ["Oslo 1", "OSLO 1"]
    assert [request.input["to"] for request in played.pending] == ["Bergen 2"]


async def test_a_program_reminds_who_has_not_paid_once_people_agree() -> None:
    code = """
import asyncio
found = await asyncio.gather(find_orders("Ada"), find_orders("Bo"))
owed = {orders[0]["customer"]: sum(each["total"] for each in orders if not each["paid"]) for orders in found}
await send_reminder(customer="Ada", amount=owed["Ada"])
"""
    model = ScriptedModel([call("code_mode", code=code), "Done."])

    played = await play(reports.agent, "Remind Ada of what she owes", model=model)
    (request,) = played.pending
    done = await played.answer("send_reminder", "approve")

    assert request.prompt == "Remind Ada of 120.00"
    assert [each.tool for each in done.tool_calls] == ["find_orders", "find_orders", "send_reminder"]
    assert done.text == "Done."


async def test_the_editor_lets_others_do_the_work() -> None:
    lines = [
        call("researcher", message="Find facts about tea."),
        call("look_up", topic="tea"),
        "Tea is drunk a lot.",
        call("writer", message="Write about tea."),
        "I may not publish.",
        "Nothing was published.",
    ]

    played = await play(newsroom.agent, "Tea, please", model=ScriptedModel(lines))

    assert [(each.tool, each.output) for each in played.tool_calls] == [
        ("researcher", "Tea is drunk a lot."),
        ("writer", "I may not publish."),
    ]
    assert played.text == "Nothing was published."


async def test_a_taster_keeps_one_score_for_each_kind() -> None:
    tastings = [call("taste", kind=kind, seconds=0) for kind in ("Assam", "Ceylon", "Assam")]

    played = await play(long_job.agent, "Taste", model=ScriptedModel([*tastings, "Ceylon."]))

    assert played.items(long_job.FINDINGS) == (long_job.Finding("Assam", 7), long_job.Finding("Ceylon", 8))
