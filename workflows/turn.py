"""One turn, as a short-lived child of its session's driver."""

from temporalio import workflow

from perdure.protocol import names
from perdure.protocol.requests import TurnRequest, TurnResult
from perdure.session.turn import ContinueAsNew, run_turn
from perdure.telemetry import spans

from .steps import ActivitySteps


@workflow.defn(name=names.TURN_WORKFLOW)
class TurnWorkflow:
    """Starts on the newest build and stays on it; its driver may run an older one."""

    @workflow.run
    async def run(self, request: TurnRequest) -> TurnResult:
        with spans.turn(request):
            end = await run_turn(request, ActivitySteps(request.bounds))
        if isinstance(end, ContinueAsNew):
            # A long turn continues as new between two steps. The driver waits for the whole chain of runs.
            workflow.continue_as_new(end.request)
        return end
