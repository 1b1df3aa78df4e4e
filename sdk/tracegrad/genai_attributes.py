"""Names of OpenTelemetry's semantic conventions for GenAI: attributes and events of spans.

The conventions are in development and their names still move: all that this project reads or writes
of them stand here. Where a name had others before, all are in one tuple: today's, which is written,
then the older ones, which are only read.

Source: opentelemetry.io/docs/specs/semconv/gen-ai. What Traceloop and OpenInference
write of their own is in `proxy/otel/semconv`.
"""

from __future__ import annotations

PREFIX = "gen_ai."

# What is done, and by whom.
OPERATION = "gen_ai.operation.name"
# Attribute -> value, by which a span says that it is a tool's call: one of OpenTelemetry's, of
# OpenInference's, of Traceloop's conventions.
OF_TOOLS = {
    OPERATION: "execute_tool",
    "openinference.span.kind": "TOOL",
    "traceloop.span.kind": "tool",
}
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"

# Texts, as attributes.
INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
INSTRUCTIONS, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
TOOL_ARGUMENTS, TOOL_RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"

# Texts, as events: all of a call; before that, each message; before that, prompt and reply. A
# log's body, as an attribute of the event that it became.
DETAILS = "gen_ai.client.inference.operation.details"
MESSAGES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
CHOICE = "gen_ai.choice"
PROMPT_EVENT, COMPLETION_EVENT = "gen_ai.content.prompt", "gen_ai.content.completion"
EVENT_CONTENT = "gen_ai.event.content"
# Attributes of those two events; Traceloop's prefixes of flat ones.
PROMPT, COMPLETION = "gen_ai.prompt", "gen_ai.completion"

REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
TEMPERATURE = ("gen_ai.request.temperature",)
TOP_P = ("gen_ai.request.top_p",)
TOP_K = ("gen_ai.request.top_k",)
MAX_TOKENS = ("gen_ai.request.max_tokens", "gen_ai.request.max_completion_tokens")
STOP = ("gen_ai.request.stop_sequences",)
SEED = ("gen_ai.request.seed", "gen_ai.openai.request.seed")
CHOICES = ("gen_ai.request.choice.count", "gen_ai.request.n")
PRESENCE_PENALTY = ("gen_ai.request.presence_penalty",)
FREQUENCY_PENALTY = ("gen_ai.request.frequency_penalty",)
FINISH_REASONS = ("gen_ai.response.finish_reasons", "gen_ai.response.finish_reason")
INPUT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
CACHED_TOKENS = ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens")
REASONING_TOKENS = ("gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens")

# An event, and its attributes.
EVALUATION = "gen_ai.evaluation.result"
EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_SCORE = "gen_ai.evaluation.score.value"
EVALUATION_LABEL = "gen_ai.evaluation.score.label"
EVALUATION_EXPLANATION = "gen_ai.evaluation.explanation"
