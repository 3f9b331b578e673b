"""How one model writes calls and reasoning: seen from its chat template, or said by whoever starts the gateway."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from pdserve.errors import ConfigError
from pdserve.gateway.formats import deepseek, hermes, llama3, reasoning
from pdserve.gateway.formats.deepseek import DeepSeekFormat
from pdserve.gateway.formats.hermes import HermesFormat
from pdserve.gateway.formats.llama3 import Llama3Format
from pdserve.gateway.formats.parser_choice import ReasoningParserChoice, ToolParserChoice
from pdserve.gateway.formats.tool_format import ToolFormat
from pdserve.text.chat_template import ChatTemplate

QWEN_CODER_MARK = "<function="
"""In a template: calls are no JSON between their tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    tools: ToolFormat | None
    """None: calls of this model can't be read."""
    template_has_tools: bool
    has_reasoning: bool
    special_tokens: Mapping[str, int]
    variables: frozenset[str]
    """What the chat template asks for."""


def model_formats(
    template: ChatTemplate | None,
    special_tokens: Mapping[str, int],
    *,
    tool_parser: ToolParserChoice,
    reasoning_parser: ReasoningParserChoice,
) -> ModelFormats:
    """Raises: `ConfigError` when the choices don't go with the template."""
    source = "" if template is None else template.with_tools.source
    variables = frozenset[str]() if template is None else template.variables | template.with_tools.variables
    without_tools = (ToolParserChoice.AUTO, ToolParserChoice.HERMES, ToolParserChoice.NONE)
    if "tools" not in variables and tool_parser not in without_tools:
        raise ConfigError(
            f"--tool-parser {tool_parser.value} needs a chat template that has tools, and the model's has none; "
            "leave it out: tools are then described in the format of Hermes"
        )
    return ModelFormats(
        tools=_tool_format(tool_parser, source, template_has_tools="tools" in variables),
        template_has_tools="tools" in variables,
        has_reasoning=_has_reasoning(reasoning_parser, source),
        special_tokens=special_tokens,
        variables=variables,
    )


def _tool_format(choice: ToolParserChoice, source: str, *, template_has_tools: bool) -> ToolFormat | None:
    match choice:
        case ToolParserChoice.AUTO:
            return _seen_format(source) if template_has_tools else HermesFormat()
        case ToolParserChoice.HERMES:
            return HermesFormat()
        case ToolParserChoice.LLAMA3:
            return Llama3Format()
        case ToolParserChoice.DEEPSEEK_V3:
            return DeepSeekFormat(is_fenced=True)
        case ToolParserChoice.DEEPSEEK_V31:
            return DeepSeekFormat(is_fenced=False)
        case ToolParserChoice.NONE:
            return None
        case _:
            assert_never(choice)


def _seen_format(source: str) -> ToolFormat | None:
    if deepseek.CALL_BEGIN in source:
        return DeepSeekFormat(is_fenced="```json" in source)
    if hermes.OPEN in source and QWEN_CODER_MARK not in source:
        return HermesFormat()
    if llama3.PYTHON_TAG in source or '"parameters": ' in source:
        return Llama3Format()
    return None


def _has_reasoning(choice: ReasoningParserChoice, source: str) -> bool:
    match choice:
        case ReasoningParserChoice.AUTO:
            return reasoning.CLOSE in source
        case ReasoningParserChoice.THINK:
            return True
        case ReasoningParserChoice.NONE:
            return False
        case _:
            assert_never(choice)
