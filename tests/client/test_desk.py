"""The example of a program that answers what sessions of others ask."""

import hashlib

import pytest

from examples import desk
from perdure.client import Client
from tests.support.plugin import StackFactory


def test_the_desk_approves_small_refunds_and_leaves_the_others(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {name: f"sk-of-{name}-1234" for name in ("shop", "desk")}
    hashed = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    entries = f"shop={hashed['shop']},desk={hashed['desk']}+role=support"
    environment = {"PERDURE_API_KEYS": entries, "PERDURE_MODEL": "openai-chat:scripted"}
    stack = make_stack(provider=True, agents="examples.approvals:agent", environment=environment)
    monkeypatch.setenv("PERDURE_KEY", keys["desk"])

    with Client(stack.url, key=keys["shop"]) as shop:
        small, large = shop.session(), shop.session()
        small.send('call refund {"order": "1", "amount": 30} then say done').result()
        large.send('call refund {"order": "2", "amount": 300} then say done').result()
        desk.main(stack.url, "50")
        result = next(event for event in small.events() if event.type == "action.result")
        (left,) = shop.inputs()

    assert capsys.readouterr().out == (
        "Refund 30.00 for order 1: approved\nRefund 300.00 for order 2: left for a person\n"
    )
    assert result.data["result"]["output"] == "Refunded 30.00."
    assert left["sessionId"] == large.id
