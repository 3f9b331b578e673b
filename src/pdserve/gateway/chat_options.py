"""What a chat asks for beside its messages and its sampling."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.gateway.tool_fields import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    tools: ToolUse | None = None
    template_variables: Mapping[str, object] = field(default_factory=dict[str, object])
    reasoning_effort: str | None = None
    adds_generation_prompt: bool = True
    continues_last: bool = False
    shows_reasoning: bool = True
