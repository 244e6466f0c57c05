"""The shape of a text turn and nothing else: signal, child workflow, one activity."""

from datetime import timedelta

from temporalio import workflow

from perdure.protocol import names as queues

from . import names


@workflow.defn(name=names.SESSION)
class FloorSession:
    """Receives signals and runs a child for each."""

    def __init__(self) -> None:
        self._inbox: list[str] = []

    @workflow.signal(name=names.DELIVER)
    def deliver(self, delivery: str) -> None:
        self._inbox.append(delivery)

    @workflow.run
    async def run(self) -> None:
        info = workflow.info()
        turn = 0
        while True:
            await workflow.wait_condition(lambda: bool(self._inbox))
            await workflow.execute_child_workflow(
                names.TURN,
                self._inbox.pop(0),
                id=f"{info.workflow_id}/turn/{turn}",
                task_queue=queues.queue(names.PREFIX, queues.TURNS_QUEUE),
            )
            turn += 1


@workflow.defn(name=names.TURN)
class FloorTurn:
    """Runs one activity."""

    @workflow.run
    async def run(self, delivery: str) -> None:
        await workflow.execute_activity(
            names.ACT,
            delivery,
            task_queue=queues.queue(names.PREFIX, queues.MODELS_QUEUE),
            start_to_close_timeout=timedelta(seconds=60),
        )
