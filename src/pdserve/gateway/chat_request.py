"""The body of `POST /v1/chat/completions`."""

from typing import Annotated, cast

from msgspec import Meta

from pdserve.errors import InvalidField
from pdserve.gateway.chat_options import ChatOptions
from pdserve.gateway.fields import NoOps, convert, parse_object, without_no_ops
from pdserve.gateway.message_fields import ChatMessage, supported_messages
from pdserve.gateway.sampling_fields import SHARED_NO_OPS, SamplingFields
from pdserve.gateway.tool_fields import MAX_TOOLS, Tool, ToolChoice, tool_use
from pdserve.sampling import MAX_TOP_LOGPROBS

CHAT_NO_OPS: NoOps = {
    **SHARED_NO_OPS,
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
}


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    """OpenAI's newer name of `max_tokens`; wins where both are given."""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    """Null is `auto`."""
    parallel_tool_calls: bool | None = None
    """Null is true."""
    add_generation_prompt: bool | None = None
    """Null is true, but for a message that is continued."""
    continue_final_message: bool | None = None
    """The answer goes on with the last message."""
    chat_template_kwargs: dict[str, object] | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: str | None = None
    """A variable of the chat template too; refused where it has none of this name."""
    include_reasoning: bool | None = None
    """vLLM's extension: false leaves the reasoning out of the answer."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def options(self) -> ChatOptions:
        """Raises: `InvalidField`."""
        tools = tool_use(
            [tool.function for tool in self.tools or ()],
            self.tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
        )
        return ChatOptions(
            tools=tools,
            template_variables=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
            adds_generation_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            continues_last=bool(self.continue_final_message),
            shows_reasoning=self.include_reasoning is not False,
        )

    def require_consistent(self) -> None:
        super().require_consistent()
        for index, message in enumerate(self.messages):
            message.require_consistent(f"messages[{index}]")
        if self.continue_final_message:
            self._require_last_unfinished()
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")

    def _require_last_unfinished(self) -> None:
        if self.add_generation_prompt:
            raise InvalidField(
                "'continue_final_message' and 'add_generation_prompt' exclude each other; send one of them",
                param="continue_final_message",
            )
        if not self.messages[-1].text:
            raise InvalidField(
                "'continue_final_message' needs a last message with a text", param="continue_final_message"
            )


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises: `InvalidField`, `UnsupportedField`."""
    fields = without_no_ops(parse_object(body), CHAT_NO_OPS)
    messages = fields.get("messages")
    if isinstance(messages, list):
        listed = cast("list[object]", messages)
        fields["messages"] = supported_messages(listed)
    request = convert(fields, ChatRequest)
    request.require_consistent()
    return request
