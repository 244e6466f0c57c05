"""How a step finds its session and its agent."""

from perdure.agents.agent import Agent
from perdure.agents.context import SessionView
from perdure.agents.registry import AgentRegistry
from perdure.errors import AgentGone, SessionGone, StoreBehind
from perdure.protocol.principals import Principal
from perdure.protocol.requests import Coordinates
from perdure.store.base import Store
from perdure.store.values import SessionRow


async def find_session(store: Store, session_id: str, head: int | None = None) -> SessionRow:
    """The session's row. `head` is the known number of events: a store with fewer is an older copy."""
    row = await store.session(session_id)
    if row is None:
        raise SessionGone()
    if head is not None and row.events < head:
        raise StoreBehind(f"The store has {row.events} events of this session, which has had {head}.")
    return row


def find_agent(agents: AgentRegistry, name: str) -> Agent:
    agent = agents.get(name)
    if agent is None:
        raise AgentGone(f"The agent {name!r} of this session is no longer served.", agent=name)
    return agent


def view_of(row: SessionRow, at: Coordinates, speaker: Principal | None) -> SessionView:
    """The session as the author's code sees it; `speaker` is the principal for whom the turn acts, if known."""
    return SessionView(
        id=row.session_id,
        agent=row.agent,
        turn=at.turn,
        step=at.step,
        auth=speaker or row.principal,
        mode=row.mode,
        parent=row.parent,
    )
