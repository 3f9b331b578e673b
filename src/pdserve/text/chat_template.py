"""A model's chat template: Jinja text that came with the weights, so untrusted, run in a sandbox."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from pdserve.errors import ConfigError, InvalidField


class ChatTemplate:
    """Renders messages as the template's authors expect: with the environment that `transformers` gives them.

    Raises: `ConfigError` when `source` is not Jinja.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source, globals=functions)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: line {error.lineno}: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The prompt; with `add_generation_prompt` up to and including the start of the assistant's answer.

        Raises: `InvalidField` when the template refuses the messages or fails on them.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # what a foreign template raises on foreign messages can't be known
            raise InvalidField(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(time_format: str) -> str:
    return datetime.now().strftime(time_format)


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own filter escapes for HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
