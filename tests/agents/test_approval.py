"""What authors may say about approvals, and what is refused when they say it."""

from datetime import timedelta
from typing import Any

import pytest

from perdure import Agent, Call, InvalidDeclaration, responders, tool


def test_times_may_be_seconds_or_timedeltas() -> None:
    @tool(approval="always", expires=timedelta(hours=1), remind=[timedelta(minutes=30), 60])
    def pay() -> None: ...

    assert (pay.approval_policy.expires, pay.approval_policy.remind) == (3600.0, (60.0, 1800.0))


def test_responders_read_as_they_are_meant() -> None:
    said = [
        responders.requester(),
        responders.anyone(quorum=2),
        responders.role("boss", "deputy"),
        responders.attribute("team", "finance", quorum=3),
        responders.principals("jwt:ada", "api-key:bob", quorum=2),
    ]

    assert [(each.kind, each.attribute, each.values, each.quorum) for each in said] == [
        ("requester", None, (), 1),
        ("anyone", None, (), 2),
        ("attribute", "role", ("boss", "deputy"), 1),
        ("attribute", "team", ("finance",), 3),
        ("principals", None, ("jwt:ada", "api-key:bob"), 2),
    ]


@pytest.mark.parametrize(
    "impossible",
    [
        lambda: responders.anyone(quorum=0),
        lambda: responders.role(),
        lambda: responders.attribute("", "x"),
        lambda: responders.principals("jwt:"),
        lambda: responders.principals("ada"),
        lambda: responders.principals("jwt:ada", "jwt:ada", quorum=2),
    ],
)
def test_responders_that_match_no_principal_are_refused(impossible: Any) -> None:
    with pytest.raises(InvalidDeclaration):
        impossible()


def one_argument(call: Call) -> bool:
    return True


def no_argument() -> str:
    return "Pay"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"approval": "never", "expires": 5}, "never asks"),
    ({"approval": "never", "summary": str}, "never asks"),
    ({"approval": "always", "approval_key": str}, "approval_key is what"),
    ({"approval": "always", "on_expiry": "approve"}, "say when that is"),
    ({"approval": "always", "expires": 5, "on_expiry": "explode"}, "on_expiry is"),
    ({"approval": "always", "expires": 0}, "more than 0"),
    ({"approval": "always", "expires": 5, "remind": [5]}, "before the request expires"),
    ({"approval": "always", "remind": [0]}, "more than 0"),
    ({"approval": "always", "responders": responders.Responders(quorum=2)}, "never be reached"),
    ({"approval": True}, "approval is"),
    ({"approval": one_argument}, "called with the call and the session"),
    ({"approval": "always", "responders": "support"}, r"`responders.role\('support'\)`"),
    ({"approval": "always", "responders": responders.requester}, "responders is what"),
    ({"approval": "always", "summary": "Pay"}, "summary is a function of the arguments"),
    ({"approval": "always", "summary": no_argument}, "summary is a function of the arguments"),
    ({"approval": "once", "approval_key": "to"}, "approval_key is a function of the arguments"),
    ({"approval": "always", "expires": "1d"}, "expires is a number of seconds or a timedelta"),
    ({"approval": "always", "remind": timedelta(hours=1)}, "remind is a list"),
    ({"approval": "always", "remind": ["1h"]}, "each of remind is a number of seconds or a timedelta"),
]


@pytest.mark.parametrize(("options", "complaint"), WRONG)
def test_approvals_that_cannot_work_are_refused(options: dict[str, Any], complaint: str) -> None:
    def pay() -> None: ...

    with pytest.raises(InvalidDeclaration, match=complaint):
        tool(**options)(pay)


def test_an_agent_declares_what_a_message_does_while_it_waits() -> None:
    assert Agent("shop").while_waiting == "queue"
    with pytest.raises(InvalidDeclaration, match="while_waiting"):
        Agent("shop", while_waiting="panic")  # type: ignore
