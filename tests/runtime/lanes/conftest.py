"""One worker and one API with two agents, and their sessions from Python."""

from collections.abc import AsyncGenerator

import pytest

from perdure import AgentRegistry
from perdure.runtime.open import open_sessions
from perdure.runtime.sessions import Sessions
from perdure.store.base import Store
from tests.runtime.agents import agent as host
from tests.runtime.served import chat
from tests.support.plugin import StackFactory
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.runtime.served:chat,tests.runtime.agents:agent")


@pytest.fixture
async def store(stack: Stack) -> AsyncGenerator[Store]:
    store = await stack.store()
    yield store
    await store.close()


@pytest.fixture
async def sessions(stack: Stack, store: Store) -> Sessions:
    return await open_sessions(stack.settings, store, agents=AgentRegistry([chat, host]))
