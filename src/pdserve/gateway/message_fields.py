"""The messages of a conversation, as OpenAI's chat API has them."""

from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidField, UnsupportedField
from pdserve.gateway.fields import NoOps, without_no_ops
from pdserve.text.chat_template import Arguments

MESSAGE_NO_OPS: NoOps = {
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
}


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str
    """The text of a JSON object; empty where there are none."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_input(self) -> dict[str, object]:
        function = {"name": self.function.name, "arguments": self.arguments}
        return {"id": self.id, "type": self.type, "function": function}

    def require_readable(self, param: str) -> None:
        """Raises: `InvalidField` when the arguments are no JSON object."""
        try:
            _ = self.arguments
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            param = f"{param}.function.arguments"
            raise InvalidField(f"'{param}' must be the text of a JSON object: {error}", param=param) from error

    @property
    def arguments(self) -> Arguments:
        return Arguments(msgspec.json.decode(self.function.arguments or "{}", type=dict[str, object]))


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    """Null only in an assistant's message that calls tools."""
    name: str | None = None
    """Of who speaks; most templates leave it out."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    """The call that a message of a tool answers."""
    reasoning_content: str | None = None
    """Of an earlier answer, sent back; most templates leave it out."""

    @property
    def text(self) -> str:
        """Text parts are one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def as_template_input(self) -> dict[str, object]:
        """What chat templates know: `developer` is OpenAI's newer word for `system`."""
        message: dict[str, object] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": None if self.content is None else self.text,
        }
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return message | {key: value for key, value in optional.items() if value is not None}

    def require_consistent(self, param: str) -> None:
        """Raises: `InvalidField` when a field is missing, or does not go with the role."""
        if self.content is None and not self.tool_calls:
            raise InvalidField(f"'{param}.content' is missing", param=f"{param}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidField(f"'{param}.tool_call_id' is missing", param=f"{param}.tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            raise InvalidField(f"'{param}.tool_call_id' is for messages of role 'tool'", param=f"{param}.tool_call_id")
        for name in ("tool_calls", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name):
                raise InvalidField(f"'{param}.{name}' is for messages of role 'assistant'", param=f"{param}.{name}")
        for index, call in enumerate(self.tool_calls or ()):
            call.require_readable(f"{param}.tool_calls[{index}]")


def supported_messages(messages: list[object]) -> list[object]:
    """Without fields that ask for nothing; what is no object is left for `convert` to refuse.

    Raises: `UnsupportedField`.
    """
    return [_supported_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _supported_message(message: object, param: str) -> object:
    if not isinstance(message, dict):
        return message
    fields = without_no_ops(cast("dict[str, object]", message), MESSAGE_NO_OPS, location=f"{param}.")
    content = fields.get("content")
    if isinstance(content, list):
        for index, part in enumerate(cast("list[object]", content)):
            kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise UnsupportedField(
                    f"content parts of type '{kind}' are not supported; send text",
                    param=f"{param}.content[{index}].type",
                )
    return fields
