"""The shapes of a text turn and nothing else: a signal and one activity, in a child workflow or in the driver."""

from datetime import timedelta

from temporalio import workflow

from . import names


@workflow.defn(name=names.SESSION)
class FloorSession:
    """Receives signals and runs a turn for each: as a child workflow, or inline."""

    def __init__(self) -> None:
        self._inbox: list[str] = []

    @workflow.signal(name=names.DELIVER)
    def deliver(self, delivery: str) -> None:
        self._inbox.append(delivery)

    @workflow.run
    async def run(self, turns: str) -> None:
        turn = 0
        while True:
            await workflow.wait_condition(lambda: bool(self._inbox))
            delivery = self._inbox.pop(0)
            if turns == "inline":
                await act(delivery)
            else:
                turn_id = f"{workflow.info().workflow_id}/turn/{turn}"
                await workflow.execute_child_workflow(names.TURN, delivery, id=turn_id, task_queue=names.QUEUE)
            turn += 1


@workflow.defn(name=names.TURN)
class FloorTurn:
    """Runs one activity."""

    @workflow.run
    async def run(self, delivery: str) -> None:
        await act(delivery)


async def act(delivery: str) -> None:
    await workflow.execute_activity(names.ACT, delivery, start_to_close_timeout=timedelta(seconds=60))
