"""An agent through which content comes in from everywhere. Each of the words to look for has one origin."""

from typing import Annotated

from pydantic import AfterValidator

from perdure import Agent, Call, SessionView, tool

RETURNED = "returned-mallard"
RAISED = "raised-cormorant"
MOOD = "instructed-bittern"
UNDECIDED = "undecided-curlew"
UNFIT = "unfit-godwit"

_moody = set[str]()


def instructions(session: SessionView) -> str:
    """Fail once in each session, with an unexpected error."""
    if session.id not in _moody:
        _moody.add(session.id)
        raise LookupError(MOOD)
    return "Be brief."


@tool(effects="pure")
def find(what: str) -> str:
    """Find something."""
    return f"{RETURNED} {len(what)}"


@tool(effects="idempotent", retries=1)
def lose(what: str) -> str:
    """Fail at each of two tries."""
    try:
        raise KeyError(f"{RAISED} first")
    except KeyError as missing:
        raise RuntimeError(f"{RAISED} {len(what)}") from missing


@tool(approval="always", summary=lambda arguments: f"Give {arguments['what']}", expires=1, on_expiry="fail")
def give(what: str) -> str:
    """Give something away."""
    return f"gave {len(what)}"


def undecided(call: Call, session: SessionView) -> bool:
    raise LookupError(UNDECIDED)


def unfit(what: str) -> str:
    raise ValueError(UNFIT)


@tool(approval=undecided)
def keep(what: str) -> None:
    """Keep something."""


@tool
def weigh(what: Annotated[str, AfterValidator(unfit)]) -> None:
    """Weigh something."""


tools = [find, lose, give, keep, weigh]
agent = Agent(name="private", model="openai-chat:scripted", instructions=instructions, tools=tools)
