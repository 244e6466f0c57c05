"""The names of all spans, attributes and metrics, and which of them are emitted.

The conventions for generative AI (`gen_ai.*`) are in development and rename what they have, so their names are in this
module only. `CURRENT` is how they are named now, `V1_41` how they were when they were published last.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

SCOPE = "perdure"

# Attributes that are named alike in both sets.
CONVERSATION_ID = "gen_ai.conversation.id"
SESSION_ID = "session.id"
USER_ID = "user.id"
USER_HASH = "user.hash"
AGENT = "gen_ai.agent.name"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"
TOKEN_MODALITY = "gen_ai.token.modality"
TOOL = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
CALL_ID = "gen_ai.tool.call.id"
ERROR = "error.type"
METHOD = "http.request.method"
ROUTE = "http.route"
STATUS_CODE = "http.response.status_code"

# Attributes with content: only where PERDURE_TELEMETRY_CONTENT allows it.
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
INSTRUCTIONS = "gen_ai.system_instructions"
ARGUMENTS = "gen_ai.tool.call.arguments"
RESULT = "gen_ai.tool.call.result"

# The events that carry content to the logs. The conventions have the first one.
INFERENCE_DETAILS = "gen_ai.client.inference.operation.details"
TOOL_DETAILS = "perdure.execute_tool.operation.details"

# Attributes of ours.
TURN = "perdure.turn"
STEP = "perdure.step"
ATTEMPT = "perdure.attempt"
OUTCOME = "perdure.outcome"
STATUS = "perdure.status"

# Metrics of ours.
TURNS = "perdure.turns"
ATTENTION = "perdure.attention"
STEPS = "perdure.steps"
TOOL_CALLS = "perdure.tool_calls"
OPEN_STREAMS = "perdure.streams.open"
SESSIONS = "perdure.sessions"
IN_NEED = "perdure.sessions.attention"
OPEN_INPUTS = "perdure.inputs.open"
WAITING_DELIVERIES = "perdure.deliveries.waiting"
LOOP_LAG = "perdure.event_loop.lag"
HTTP_SECONDS = "http.server.request.duration"

# Metrics of the conventions that have one name.
INVOCATION_SECONDS = "gen_ai.invoke_agent.duration"
INVOCATION_MODEL_CALLS = "gen_ai.invoke_agent.inference_calls"
INVOCATION_TOOL_CALLS = "gen_ai.invoke_agent.tool_calls"
USED_INPUT = "gen_ai.client.inference.usage.input_tokens"
USED_OUTPUT = "gen_ai.client.inference.usage.output_tokens"
USED_CACHE_READ = "gen_ai.client.inference.usage.cache_read.input_tokens"
USED_CACHE_WRITE = "gen_ai.client.inference.usage.cache_write.input_tokens"
USED_REASONING = "gen_ai.client.inference.usage.reasoning.output_tokens"
CALL_INPUT = "gen_ai.client.inference.operation.input_tokens"
CALL_OUTPUT = "gen_ai.client.inference.operation.output_tokens"
#: Of V1_41: one histogram for all tokens, by their type.
TOKEN_USAGE = "gen_ai.client.token.usage"


@dataclass(frozen=True)
class NameSet:
    """The names that differ."""

    cache_write_tokens: str
    model_seconds: str
    first_chunk_seconds: str
    tool_seconds: str
    #: Whether tokens are one histogram by type; otherwise they are counters and histograms of their own.
    one_token_histogram: bool
    #: Whether there are metrics of whole turns.
    invocations: bool


CURRENT = NameSet(
    cache_write_tokens="gen_ai.usage.cache_write.input_tokens",
    model_seconds="gen_ai.client.inference.duration",
    first_chunk_seconds="gen_ai.client.inference.time_to_first_chunk",
    tool_seconds="gen_ai.execute_tool.duration",
    one_token_histogram=False,
    invocations=True,
)
V1_41 = NameSet(
    cache_write_tokens="gen_ai.usage.cache_creation.input_tokens",
    model_seconds="gen_ai.client.operation.duration",
    first_chunk_seconds="gen_ai.client.operation.time_to_first_chunk",
    tool_seconds="perdure.tool.duration",
    one_token_histogram=True,
    invocations=False,
)

Named: TypeAlias = Literal["current", "v1.41", "both"]
SETS: dict[Named, tuple[NameSet, ...]] = {"current": (CURRENT,), "v1.41": (V1_41,), "both": (CURRENT, V1_41)}

#: How the conventions name the providers that pydantic-ai names otherwise.
PROVIDERS = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "google": "gcp.gen_ai",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "grok": "x_ai",
    "mistral": "mistral_ai",
    "moonshotai": "moonshot_ai",
    "openai-chat": "openai",
    "openai-responses": "openai",
    "xai": "x_ai",
}
