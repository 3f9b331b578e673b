"""Grammars out of the fields that ask for structured output, and what is said of those that can't be compiled."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.pure.chat_models import PLAIN, ByteTokenizer
from tests.pure.schemas import SCHEMAS

from pdserve.errors import CapacityError, InvalidField
from pdserve.gateway import grammar_compiler
from pdserve.gateway.completion_request import parse_completion_request
from pdserve.gateway.grammar import of_lark, of_schema
from pdserve.gateway.grammar_compiler import MAX_SCHEMA_KEYS, GrammarCompiler
from pdserve.gateway.served_model import ServedModel

TOKENIZER = LLTokenizer("byte")
MAX_TOKENS = 4000
CLOSING = {*b'"}]', TOKENIZER.eos_token}


def model() -> ServedModel:
    return ServedModel(ByteTokenizer(PLAIN), name="smol")


async def compiled(**fields: object) -> str:
    body = {"model": "smol", "prompt": "x", **fields}
    structure = parse_completion_request(json.dumps(body).encode()).structure()
    assert structure is not None
    return await model().compiled(structure)


def walk(grammar: str, seed: int) -> str | None:
    """An answer whose tokens are drawn from those that may come next, with a bias to its end; None: cut off."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    draw = random.Random(seed)
    answer: list[int] = []
    while not matcher.is_stopped() and len(answer) < MAX_TOKENS:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(token_id) for token_id in np.flatnonzero(mask)]
        closing = [token_id for token_id in allowed if token_id in CLOSING]
        token_id = draw.choice(closing if closing and draw.random() < 0.3 else allowed)
        if token_id == TOKENIZER.eos_token:
            break
        assert matcher.consume_token(token_id)
        answer.append(token_id)
    assert not matcher.is_error(), matcher.get_error()
    return TOKENIZER.decode_bytes(answer).decode() if matcher.is_accepting() else None


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("name", SCHEMAS)
async def test_answers_that_keep_to_the_masks_are_valid(name: str) -> None:
    schema = SCHEMAS[name]
    fields = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    grammar = await compiled(response_format=fields)
    num_complete = 0
    for seed in range(10):
        answer = walk(grammar, seed)
        if answer is not None:
            num_complete += 1
            jsonschema.validate(json.loads(answer), schema)
    assert num_complete >= 5


async def test_json_has_no_whitespace_between_its_tokens() -> None:
    grammar = await compiled(response_format={"type": "json_object"})
    assert matches(grammar, '{"a":[1,{"b":null}]}')
    assert not matches(grammar, '{"a": 1}')
    assert not matches(grammar, "[1]")


ASKED: list[tuple[dict[str, object], str, str]] = [
    ({"guided_json": {"type": "integer"}}, "12", "x"),
    ({"guided_json": '{"type": "integer"}'}, "12", "1.5"),
    ({"guided_regex": "[ab]{2}/\\n"}, "ab/\n", "ab"),
    ({"guided_choice": ['a"b', "\\", "é\n", "a"]}, 'a"b', "b"),
    ({"guided_choice": ['a"b', "\\", "é\n", "a"]}, "é\n", ""),
    ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, "a12", "a"),
    ({"guided_grammar": 'root ::= "a" b\nb ::= [0-9]+'}, "a12", "a"),
    ({"structured_outputs": {"json": {"type": "integer"}}}, "12", "x"),
    ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
    ({"structured_outputs": {"choice": ["a"]}}, "a", "b"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "a", "b"),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, "a", "b"),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), ASKED)
async def test_field_makes_the_grammar_that_it_asks_for(fields: dict[str, object], right: str, wrong: str) -> None:
    grammar = await compiled(**fields)
    assert matches(grammar, right)
    assert not matches(grammar, wrong)


def schema_format(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


PLACE = "response_format.json_schema.schema"

REFUSED: list[tuple[dict[str, object], str]] = [
    (schema_format({"properties": {"age": {"type": "text"}}}), f"{PLACE}.properties.age.type"),
    (schema_format({"type": "array", "items": {"uniqueItems": True}}), f"{PLACE}.items.uniqueItems"),
    (schema_format({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]}), f"{PLACE}.anyOf[1].pattern"),
    (
        schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}}),
        f"{PLACE}.$defs.a.minimum",
    ),
    (schema_format({"properties": {"a": {"$ref": "#/nowhere"}}}), f"{PLACE}.properties.a.$ref"),
    (schema_format({"not": {"type": "null"}}), f"{PLACE}.not"),
    (schema_format({"required": "x"}), f"{PLACE}.required"),
    (schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), PLACE),
    (schema_format({"properties": {str(index): True for index in range(MAX_SCHEMA_KEYS)}}), PLACE),
    (schema_format(3), PLACE),
    (schema_format(None), PLACE),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_json": {"type": "text"}}, "guided_json.type"),
    ({"structured_outputs": {"json": {"type": "text"}}}, "structured_outputs.json.type"),
    ({"guided_regex": "a("}, "guided_regex"),
    ({"guided_regex": "(?=a)a"}, "guided_regex"),
    ({"guided_regex": "((((a{100}){100}){100}){100})"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice[0]"),
    ({"guided_grammar": "hello"}, "guided_grammar"),
    ({"guided_grammar": "start: a\na: a"}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "(" * 3000}, "guided_grammar"),
    ({"guided_grammar": "start: " + "(" * 3000}, "guided_grammar"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_structure_that_is_wrong_is_refused_by_its_place(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidField) as raised:
        await compiled(**fields)
    assert raised.value.param == param
    assert raised.value.message


async def test_grammar_that_does_not_fit_a_message_is_refused() -> None:
    grammar = of_schema({"enum": ["x" * 300_000]})
    with pytest.raises(InvalidField, match="over 262144 bytes"):
        await GrammarCompiler(ByteTokenizer(PLAIN)).require_compiled(grammar, param="guided_json")


async def test_grammars_that_take_too_long_are_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "COMPILE_TIMEOUT_S", 0.0)
    with pytest.raises(CapacityError, match="too many grammars"):
        await GrammarCompiler(ByteTokenizer(PLAIN)).require_compiled(of_lark('start: "a"'), param="x")


async def test_options_within_a_schema_stay_but_for_whitespace() -> None:
    options: dict[str, Any] = {"x-guidance": {"lenient": True, "whitespace_flexible": True}, "uniqueItems": True}
    grammar = await compiled(guided_json={"type": "array", "items": {"type": "integer"}, **options})
    assert matches(grammar, "[1,1]")
    assert not matches(grammar, "[1, 1]")
