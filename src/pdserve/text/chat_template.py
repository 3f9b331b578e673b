"""A model's chat template: Jinja text that came with the weights, so untrusted, run in a sandbox."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pdserve.errors import ConfigError, InvalidField

MAX_PROMPT_CHARS = 16 * 1024 * 1024
"""Several times what a body may hold: a template that repeats itself for ever is stopped."""

Message = Mapping[str, object]

FUNCTIONS = frozenset({"raise_exception", "strftime_now"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template makes a prompt of."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None
    """As OpenAI describes them."""
    variables: Mapping[str, object] = field(default_factory=dict[str, object])
    """What else the template is given, such as `enable_thinking`."""
    add_generation_prompt: bool = True
    """The prompt goes up to and including the start of the assistant's answer."""
    continues_last: bool = False
    """The prompt ends inside the last message, whose content is a text."""


class Arguments(dict[str, object]):
    """Of an earlier call of a tool: an object to templates that want one, as most do, and JSON text to those that put
    it between other texts."""

    def __str__(self) -> str:
        return _to_json(self)

    def __radd__(self, before: object) -> str:
        return f"{before}{self}"

    def __add__(self, after: object) -> str:
        return f"{self}{after}"


class ChatTemplate:
    """Renders messages as the template's authors expect: with the environment that `transformers` gives them.

    Raises: `ConfigError` when `source` is not Jinja.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], with_tools: "ChatTemplate | None" = None
    ) -> None:
        """`with_tools` takes its place where there are tools."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source, globals=functions)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: line {error.lineno}: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.with_tools = with_tools or self
        self.variables = frozenset(names) - FUNCTIONS - special_tokens.keys()
        """Names that it asks for."""

    def render(self, conversation: Conversation) -> str:
        """The prompt.

        Raises: `InvalidField` when the template refuses the messages or fails on them.
        """
        if conversation.continues_last:
            return self._render_unfinished(conversation)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                {
                    **conversation.variables,
                    **self._special_tokens,
                    "messages": conversation.messages,
                    "tools": conversation.tools,
                    "documents": None,
                    "add_generation_prompt": conversation.add_generation_prompt,
                }
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise jinja2.TemplateError(f"the prompt has over {MAX_PROMPT_CHARS} characters")
        except Exception as error:  # what a foreign template raises on foreign messages can't be known
            raise InvalidField(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return "".join(pieces)

    def _render_unfinished(self, conversation: Conversation) -> str:
        """Up to a mark at the end of the last message's content."""
        *before, last = conversation.messages
        mark = secrets.token_hex(16)
        marked = {**last, "content": f"{last['content']}{mark}"}
        text = self.render(
            replace(conversation, messages=[*before, marked], add_generation_prompt=False, continues_last=False)
        )
        prompt, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidField(
                "the model's chat template leaves out the last message, so it can't be continued", param="messages"
            )
        return prompt


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks, for training, what an assistant says; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(time_format: str) -> str:
    return datetime.now().strftime(time_format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
