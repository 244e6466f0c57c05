"""One turn, as a short-lived child of its session's driver."""

from temporalio import workflow

from perdure.protocol import names
from perdure.protocol.requests import TurnRequest, TurnResult
from perdure.session.turn import ContinueAsNew, run_turn
from perdure.telemetry import spans

from .steps import ActivitySteps


@workflow.defn(name=names.TURN_WORKFLOW)
class TurnWorkflow:
    """Starts on the newest turn code and stays there; its driver may be older."""

    @workflow.run
    async def run(self, request: TurnRequest) -> TurnResult:
        with spans.turn(request):
            end = await run_turn(request, ActivitySteps())
        if isinstance(end, ContinueAsNew):
            # The history of a long turn is cut between two steps; the driver waits for the chain as for one run.
            workflow.continue_as_new(end.request)
        return end
