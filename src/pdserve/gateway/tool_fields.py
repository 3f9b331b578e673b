"""The fields that offer tools to a model, as OpenAI's chat API has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidField
from pdserve.gateway.grammar import ANY_OBJECT, Schema

MAX_TOOLS = 128
"""OpenAI's bound."""

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    """A JSON schema of the arguments, an object; none: any object."""
    strict: bool | None = None
    """Forced calls match the schema in any case, calls that the model chooses in none."""


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChosenFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools that a model may call, or must."""

    tools: tuple[Function, ...]
    forced: tuple[Function, ...] = ()
    """One of these must be called; empty where the model chooses."""
    is_parallel: bool = True
    """Several calls may be made in one answer."""

    @property
    def names(self) -> frozenset[str]:
        """Of the tools whose calls are read."""
        return frozenset(tool.name for tool in self.forced or self.tools)

    @property
    def as_template_input(self) -> list[dict[str, object]]:
        return [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in self.tools]

    def param_of(self, tool: Function) -> str:
        return f"tools[{self.tools.index(tool)}].function.parameters"


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


def tool_use(tools: Sequence[Function], choice: ToolChoice | None, *, is_parallel: bool) -> ToolUse | None:
    """None where no tool may be called; a choice of None is `auto`.

    Raises: `InvalidField` when names are not distinct, parameters are no object's or the choice needs another tool.
    """
    names = [tool.name for tool in tools]
    for index, tool in enumerate(tools):
        if tool.name in names[:index]:
            param = f"tools[{index}].function.name"
            raise InvalidField(f"'{param}' is {tool.name!r}, as that of another tool", param=param)
        if schema_of(tool)["type"] != "object":
            param = f"tools[{index}].function.parameters.type"
            raise InvalidField(f"'{param}' must be 'object'", param=param)
    forced = _forced(tools, choice)
    if not tools or choice == "none":
        return None
    return ToolUse(tools=tuple(tools), forced=forced, is_parallel=is_parallel)


def schema_of(tool: Function) -> Schema:
    """Of its arguments."""
    return {**ANY_OBJECT, **(tool.parameters or {})}


def _forced(tools: Sequence[Function], choice: ToolChoice | None) -> tuple[Function, ...]:
    if choice == "required" and not tools:
        raise InvalidField("'tool_choice' is 'required', and there are no 'tools'", param="tool_choice")
    if not isinstance(choice, ChosenTool):
        return tuple(tools) if choice == "required" else ()
    name = choice.function.name
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        param = "tool_choice.function.name"
        raise InvalidField(f"'{param}' is {name!r}, which is none of 'tools'", param=param)
    return chosen
