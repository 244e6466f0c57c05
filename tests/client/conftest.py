import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    """One worker, one API and the scripted provider. Who says nothing is taken for dead sooner than elsewhere."""
    environment = {"PERDURE_HEARTBEAT_TIMEOUT": "2"}
    return module_stack(provider=True, agents="tests.client.agents:agent", environment=environment)
