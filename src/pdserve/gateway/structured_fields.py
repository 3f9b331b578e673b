"""The fields that ask for structured output: OpenAI's `response_format` and vLLM's, of which a request may have one."""

from dataclasses import dataclass
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidField
from pdserve.gateway import grammar as grammars
from pdserve.gateway.grammar import Grammar, Schema

GrammarText = Annotated[str, Meta(min_length=1, max_length=65_536)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=4096)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, object]
    strict: bool | None = None
    """Answers match the schema in any case."""
    description: str | None = None
    """For people: the model does not see it, as it does not see the schema."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's newer form of its `guided_` fields."""

    json: str | dict[str, object] | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What an answer's content must match, with the field that asks for it."""

    param: str
    grammar: Grammar
    schema: Schema | None = None
    """Where the grammar is one of a JSON schema."""


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, object] | None = None
    """A JSON schema, or the text of one."""
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None

    def structure(self) -> Structure | None:
        """Raises: `InvalidField` when there are several, or one can't be read.

        Cost: up to 0.1 s, for a long GBNF grammar.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        asked = [
            _of_response_format(self.response_format),
            _of_json("guided_json", self.guided_json),
            _of_json("structured_outputs.json", outputs.json),
            _of_regex("guided_regex", self.guided_regex),
            _of_regex("structured_outputs.regex", outputs.regex),
            _of_choice("guided_choice", self.guided_choice),
            _of_choice("structured_outputs.choice", outputs.choice),
            _of_grammar("guided_grammar", self.guided_grammar),
            _of_grammar("structured_outputs.grammar", outputs.grammar),
        ]
        structures = [structure for structure in asked if structure is not None]
        if len(structures) > 1:
            first, second = structures[0].param, structures[1].param
            raise InvalidField(f"'{second}' and '{first}' exclude each other; send one of them", param=second)
        return structures[0] if structures else None


def _of_response_format(response_format: ResponseFormat | None) -> Structure | None:
    if response_format is None:
        return None
    schema = response_format.json_schema
    if (schema is not None) != (response_format.type == "json_schema"):
        raise InvalidField(
            "'response_format.json_schema' goes with the type 'json_schema', and is needed there",
            param="response_format.json_schema",
        )
    if schema is not None:
        return _of_schema("response_format.json_schema.schema", schema.schema)
    return _of_schema("response_format", grammars.ANY_OBJECT) if response_format.type == "json_object" else None


def _of_json(param: str, schema: str | dict[str, object] | None) -> Structure | None:
    if schema is None:
        return None
    if isinstance(schema, dict):
        return _of_schema(param, schema)
    try:
        parsed: object = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidField(f"'{param}' is no valid JSON: {error}", param=param) from error
    if not isinstance(parsed, dict):
        raise InvalidField(f"'{param}' must be a JSON schema that is an object", param=param)
    return _of_schema(param, cast("dict[str, object]", parsed))


def _of_schema(param: str, schema: Schema) -> Structure:
    return Structure(param=param, grammar=grammars.of_schema(schema), schema=schema)


def _of_regex(param: str, regex: str | None) -> Structure | None:
    return None if regex is None else Structure(param=param, grammar=grammars.of_regex(regex))


def _of_choice(param: str, choices: list[str] | None) -> Structure | None:
    return None if choices is None else Structure(param=param, grammar=grammars.of_choice(choices))


def _of_grammar(param: str, text: str | None) -> Structure | None:
    return None if text is None else Structure(param=param, grammar=grammars.of_text(text, param=param))
