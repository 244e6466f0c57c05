"""Try an agent without a server, a key or Temporal.

    from perdure.testing import ScriptedModel, call, play

    async def test_the_cart_is_filled() -> None:
        model = ScriptedModel([call("add_item", sku="tea"), "Added."])

        played = await play(shop, "Tea, please", model=model)

        assert played.text == "Added."
        assert played.tool_calls[0].output == "1 item"
        assert played.state(CART).items == ["tea"]

`play` runs the real harness over a store in memory: one turn for each message. Without `model` the built-in demo
model answers. It stops at input requests, and continues with their answers:

        played = await play(shop, "Order it", model=ScriptedModel([call("order"), "Ordered."]))
        played = await played.answer("order", "approve")

`play_run` does the same for a run; its sleeps take no time:

    async def test_the_night_is_counted() -> None:
        played = await play_run(nightly, {"day": "2027-01-31"}, agents=[writer], model=ScriptedModel(["Quiet."]))

        assert played.result["total"] == 42
"""

from .play import Played, PlayedCall, play
from .play_run import PlayedRun, PlayedStep, play_run
from .stage import Dispatched, Line, OneModel, ScriptedCall, ScriptedModel, call

__all__ = [
    "Dispatched",
    "Line",
    "OneModel",
    "Played",
    "PlayedCall",
    "PlayedRun",
    "PlayedStep",
    "ScriptedCall",
    "ScriptedModel",
    "call",
    "play",
    "play_run",
]
