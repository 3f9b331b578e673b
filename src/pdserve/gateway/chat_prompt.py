"""How a chat is put to the model that is served, and how its answers are to be read."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import InvalidField, UnsupportedField
from pdserve.gateway import grammar as grammars
from pdserve.gateway.chat_options import ChatOptions
from pdserve.gateway.chat_parser import ChatParser, MakeChatParser, PlainParser
from pdserve.gateway.formats import reasoning
from pdserve.gateway.formats.model_formats import ModelFormats
from pdserve.gateway.formats.reasoning import ReasoningParser, ReasoningStart
from pdserve.gateway.formats.special_tokens import WithoutSpecialTokens
from pdserve.gateway.formats.tool_format import MAX_FORCED_CALLS, FirstCallOnly, ToolFormat
from pdserve.gateway.grammar import Grammar
from pdserve.gateway.message_fields import ChatMessage
from pdserve.gateway.tool_fields import ToolUse, schema_of
from pdserve.gateway.tool_prompt import with_tools_described
from pdserve.text.chat_template import Conversation, Message

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Of chat templates: they have fields of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    conversation: Conversation
    options: ChatOptions
    formats: ModelFormats
    tool_format: ToolFormat | None
    """Of the calls that answers may have; None: there are none."""

    def reasoning_start(self, prompt: str) -> ReasoningStart | None:
        """Given the whole text; None where the model has no reasoning."""
        if not self.formats.has_reasoning:
            return None
        if self.options.continues_last:
            return reasoning.reasoning_start_within(str(self.conversation.messages[-1]["content"]))
        return reasoning.reasoning_start(prompt)

    def grammar(self, content: Grammar | None, start: ReasoningStart | None) -> Grammar | None:
        """What answers must match when their content must match `content`; None where anything goes."""
        answer = self._answer_grammar(content)
        if answer is None or start is None:
            return answer
        lark = reasoning.reasoning_first(start, self.formats.special_tokens)
        return grammars.of_lark(lark, answer.named("answer"))

    def _answer_grammar(self, content: Grammar | None) -> Grammar | None:
        """A model that may call a tool may do so instead of an answer with a structure."""
        tools = self.options.tools
        if tools is None or self.tool_format is None or (content is None and not tools.forced):
            return content
        calls = _calls_grammar(tools, self.tool_format, self.formats)
        if content is None or tools.forced:
            return calls
        return grammars.of_lark("start: @content | @calls", content.named("content"), calls.named("calls"))

    def make_parser(self, start: ReasoningStart | None, *, keeps_special_tokens: bool) -> MakeChatParser:
        """`keeps_special_tokens`: the client wants to see those that its answers have."""
        tools, tool_format, options = self.options.tools, self.tool_format, self.options
        is_filtered = self.needs_special_tokens and not keeps_special_tokens
        hidden = self.formats.special_tokens.keys() - self._markers

        def make() -> ChatParser:
            parser: ChatParser = PlainParser()
            if tools is not None and tool_format is not None:
                parser = tool_format.parser(tools.names)
                parser = parser if tools.is_parallel else FirstCallOnly(parser)
            if start is not None:
                parser = ReasoningParser(parser, start, is_shown=options.shows_reasoning)
            return WithoutSpecialTokens(parser, hidden) if is_filtered else parser

        return make

    @property
    def needs_special_tokens(self) -> bool:
        """To read the answers, their text must have them."""
        return not self._markers.isdisjoint(self.formats.special_tokens)

    @property
    def _markers(self) -> frozenset[str]:
        of_calls = () if self.tool_format is None else self.tool_format.markers
        of_reasoning = reasoning.MARKERS if self.formats.has_reasoning else ()
        return frozenset([*of_calls, *of_reasoning])


def chat_prompt(messages: Sequence[ChatMessage], options: ChatOptions, formats: ModelFormats) -> ChatPrompt:
    """Raises: `InvalidField`, `UnsupportedField`."""
    if options.tools is not None and formats.tools is None:
        raise UnsupportedField("tools are not supported for this model; leave them out", param="tools")
    tools = options.tools
    if formats.template_has_tools:
        inputs: list[Message] = [message.as_template_input for message in messages]
    else:
        inputs = with_tools_described(messages, () if tools is None else tools.tools)
    conversation = Conversation(
        messages=inputs,
        tools=None if tools is None or not formats.template_has_tools else tools.as_template_input,
        variables=_variables(options, formats.variables),
        add_generation_prompt=options.adds_generation_prompt,
        continues_last=options.continues_last,
    )
    tool_format = None if options.tools is None else formats.tools
    return ChatPrompt(conversation=conversation, options=options, formats=formats, tool_format=tool_format)


def _variables(options: ChatOptions, known: frozenset[str]) -> dict[str, object]:
    """Those of the client for the template, of which it has each."""
    variables = dict(options.template_variables)
    for name, value in variables.items():
        param = f"chat_template_kwargs.{name}"
        if name in RESERVED_VARIABLES or name not in known:
            raise InvalidField(f"'{param}' is no variable of this model's chat template", param=param)
        if value is not None and not isinstance(value, str | int | float):
            raise InvalidField(f"'{param}' must be a text, a number, a boolean or null", param=param)
    if options.reasoning_effort is not None:
        if "reasoning_effort" not in known:
            raise UnsupportedField(
                "this model's chat template knows no 'reasoning_effort'; leave it out", param="reasoning_effort"
            )
        variables["reasoning_effort"] = options.reasoning_effort
    return variables


def _calls_grammar(tools: ToolUse, tool_format: ToolFormat, formats: ModelFormats) -> Grammar:
    called = tools.forced or tools.tools
    max_calls = MAX_FORCED_CALLS if tools.is_parallel else 1
    lark = tool_format.forced([tool.name for tool in called], formats.special_tokens, max_calls=max_calls)
    arguments = [grammars.of_schema(schema_of(tool)).named(f"arguments_{index}") for index, tool in enumerate(called)]
    return grammars.of_lark(lark, *arguments)
