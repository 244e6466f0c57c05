"""The shapes of a text turn and nothing else: a signal and one activity, in a child workflow or in the driver."""

from datetime import timedelta

from temporalio import workflow

from . import names


class _Floor:
    """Receives signals and runs a turn for each."""

    def __init__(self) -> None:
        self._inbox: list[str] = []

    async def _run(self) -> None:
        turn = 0
        while True:
            await workflow.wait_condition(lambda: bool(self._inbox))
            await self._turn(self._inbox.pop(0), turn)
            turn += 1

    async def _turn(self, delivery: str, turn: int) -> None:
        raise NotImplementedError


@workflow.defn(name=names.CHILD)
class ChildFloor(_Floor):
    """Each turn is a child workflow."""

    @workflow.signal(name=names.DELIVER)
    def deliver(self, delivery: str) -> None:
        self._inbox.append(delivery)

    @workflow.run
    async def run(self) -> None:
        await self._run()

    async def _turn(self, delivery: str, turn: int) -> None:
        await workflow.execute_child_workflow(
            names.TURN, delivery, id=f"{workflow.info().workflow_id}/turn/{turn}", task_queue=names.QUEUE
        )


@workflow.defn(name=names.INLINE)
class InlineFloor(_Floor):
    """Each turn is an activity of the driver."""

    @workflow.signal(name=names.DELIVER)
    def deliver(self, delivery: str) -> None:
        self._inbox.append(delivery)

    @workflow.run
    async def run(self) -> None:
        await self._run()

    async def _turn(self, delivery: str, turn: int) -> None:
        await act(delivery)


@workflow.defn(name=names.TURN)
class FloorTurn:
    """Runs one activity."""

    @workflow.run
    async def run(self, delivery: str) -> None:
        await act(delivery)


async def act(delivery: str) -> None:
    await workflow.execute_activity(names.ACT, delivery, start_to_close_timeout=timedelta(seconds=60))
