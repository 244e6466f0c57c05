"""What the client writes again of the wire, because it imports nothing else of Perdure."""

from perdure.client import events as client
from perdure.protocol import events as wire


def test_the_events_that_end_something_are_those_of_the_wire() -> None:
    assert client.BOUNDARIES == wire.BOUNDARIES
    # A client has sessions, and reads no stream of a run.
    assert client.TERMINAL == wire.TERMINAL - wire.RUN_ENDS


def test_the_fields_of_pieces_are_those_of_the_wire() -> None:
    assert client._DELTAS == wire.DELTAS  # pyright: ignore[reportPrivateUsage]
