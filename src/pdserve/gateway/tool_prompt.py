"""Tools for models whose chat template knows none: described in the system message, in the format of Hermes."""

import json
from collections.abc import Sequence

import msgspec

from pdserve.gateway.formats.hermes import CLOSE, OPEN
from pdserve.gateway.message_fields import ChatMessage, ToolCall
from pdserve.gateway.tool_fields import Function
from pdserve.text.chat_template import Message

_BEFORE = "You can call functions. Those that there are, one in a line, as JSON:"
_AFTER = (
    "To call one, write its name and its arguments, which match its parameters, as JSON between tags, "
    "and nothing else:\n"
    f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}'
)


def with_tools_described(messages: Sequence[ChatMessage], tools: Sequence[Function]) -> list[Message]:
    """Messages with a role and a content alone; what tools answered comes from the user."""
    plain: list[tuple[str, str]] = []
    if tools:
        described = "\n".join(_json(msgspec.to_builtins(tool)) for tool in tools)
        plain.append(("system", f"{_BEFORE}\n{described}\n{_AFTER}"))
    for message in messages:
        role, text = _plain(message)
        if plain and plain[-1][0] == role and (role == "system" or message.role == "tool"):
            text = f"{plain.pop()[1]}\n\n{text}"
        plain.append((role, text))
    return [{"role": role, "content": text} for role, text in plain]


def _plain(message: ChatMessage) -> tuple[str, str]:
    match message.role:
        case "tool":
            return "user", f"<tool_response>\n{message.text}\n</tool_response>"
        case "developer":
            return "system", message.text
        case _:
            calls = [_call_text(call) for call in message.tool_calls or ()]
            return message.role, "\n".join([message.text, *calls] if message.text else calls)


def _call_text(call: ToolCall) -> str:
    return f"{OPEN}\n{_json({'name': call.function.name, 'arguments': call.arguments})}\n{CLOSE}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
