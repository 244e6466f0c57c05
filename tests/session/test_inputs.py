"""Votes, quorums and who may answer."""

from typing import Any

import pytest

from perdure.protocol.deliveries import Principal
from perdure.protocol.inputs import InputAnswer, InputRequest, Responders
from perdure.session.inputs import at_expiry, may_answer, verdict


def a_request(**changes: Any) -> InputRequest:
    values: dict[str, Any] = {
        "request_id": "inp_1",
        "session_id": "ses_1",
        "agent": "demo",
        "turn": 0,
        "step": 0,
        "call_id": "c",
        "tool": "pay",
        "kind": "approval",
        "prompt": "Pay?",
        "input": {},
        "digest": "d",
        "display": "confirmation",
    }
    return InputRequest.model_validate({**values, **changes})


def chooses(option: str, who: str = "ada", **more: Any) -> InputAnswer:
    return InputAnswer(option_id=option, principal_id=who, **more)


def someone(name: str, **attributes: str | list[str]) -> Principal:
    return Principal(principal_id=name, principal_type="user", authenticator="test", attributes=attributes)


def test_the_first_answer_counts() -> None:
    assert verdict(a_request(), [chooses("approve")]) == chooses("approve")


def test_without_a_vote_there_is_no_verdict() -> None:
    assert verdict(a_request(), []) is None


def test_a_quorum_needs_distinct_principals() -> None:
    request = a_request(responders=Responders(kind="anyone", quorum=2))

    assert verdict(request, [chooses("approve", "ada"), chooses("approve", "ada")]) is None
    assert verdict(request, [chooses("approve", "ada"), chooses("approve", "bob")]) == chooses("approve", "bob")


def test_namesakes_are_two() -> None:
    """A service and a user may have one name."""
    request = a_request(responders=Responders(kind="anyone", quorum=2))
    service, user = chooses("approve", owner="api-key||ada"), chooses("approve", owner="jwt|https://id.test|ada")

    assert verdict(request, [service, user]) == user
    assert verdict(request, [service, service]) is None


def test_a_vote_of_an_older_build_knows_the_name_alone() -> None:
    request = a_request(responders=Responders(kind="anyone", quorum=2))

    assert verdict(request, [chooses("approve"), chooses("approve", owner="jwt|https://id.test|ada")]) is None


def test_one_denial_is_enough() -> None:
    request = a_request(responders=Responders(kind="anyone", quorum=3))

    assert verdict(request, [chooses("approve", "ada"), chooses("deny", "bob")]) == chooses("deny", "bob")


def test_arguments_that_only_python_takes_for_equal_do_not_add_up() -> None:
    request = a_request(responders=Responders(kind="anyone", quorum=2))
    one, true = ({"to": {"sides": [value]}} for value in (1, True))

    votes = [chooses("approve", "ada", arguments=one), chooses("approve", "bob", arguments=true)]
    assert verdict(request, votes) is None
    assert verdict(request, [*votes, chooses("approve", "eve", arguments=one)]) is not None


def test_approvals_of_different_arguments_do_not_add_up() -> None:
    request = a_request(responders=Responders(kind="anyone", quorum=2))

    assert verdict(request, [chooses("approve", "ada"), chooses("approve", "bob", arguments={"amount": 9})]) is None


@pytest.mark.parametrize(
    ("responders", "allowed"),
    [
        (Responders(), False),
        (Responders(kind="anyone"), True),
        (Responders(kind="principals", values=("test:ada",)), True),
        (Responders(kind="principals", values=("test:bob",)), False),
        # A service of this name is another principal.
        (Responders(kind="principals", values=("api-key:ada",)), False),
        # As older builds have asked.
        (Responders(kind="principals", values=("ada",)), True),
        (Responders(kind="principals", values=("bob",)), False),
        (Responders(kind="attribute", attribute="role", values=("admin",)), True),
        (Responders(kind="attribute", attribute="role", values=("owner",)), False),
        (Responders(kind="attribute", attribute="team", values=("red",)), True),
        (Responders(kind="attribute", attribute="nothing", values=("red",)), False),
    ],
)
def test_the_responder_policy_decides_who_may_answer(responders: Responders, allowed: bool) -> None:
    ada = someone("ada", role="admin", team=["blue", "red"])

    assert may_answer(responders, ada, requester=someone("carol")) is allowed


def test_the_requester_may_answer_by_default() -> None:
    assert may_answer(Responders(), someone("carol"), requester=someone("carol"))


@pytest.mark.parametrize(("consequence", "approves"), [("deny", False), ("approve", True), ("fail", False)])
def test_an_expiry_means_what_the_request_declares(consequence: str, approves: bool) -> None:
    assert at_expiry(a_request(on_expiry=consequence)).approves is approves
