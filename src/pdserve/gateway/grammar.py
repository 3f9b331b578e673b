"""Grammars as llguidance reads them: JSON with named parts, each a JSON schema or a grammar in its dialect of Lark."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from pdserve.errors import InvalidField

Schema = Mapping[str, object]

ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match. `start` is the part that it begins with; `others` are those that parts name by `@`."""

    start: Mapping[str, object]
    others: tuple[Mapping[str, object], ...] = ()

    @property
    def text(self) -> str:
        return json.dumps({"grammars": [self.start, *self.others]}, ensure_ascii=False)

    @property
    def parts(self) -> tuple[Mapping[str, object], ...]:
        return (self.start, *self.others)

    def named(self, name: str) -> "Grammar":
        return Grammar({**self.start, "name": name}, self.others)


def of_schema(schema: Schema) -> Grammar:
    """JSON without whitespace between its tokens: small models may fill an answer with it."""
    options = schema.get("x-guidance")
    chosen: Mapping[str, object] = cast("Mapping[str, object]", options) if isinstance(options, dict) else {}
    return Grammar({"json_schema": {**schema, "x-guidance": {**chosen, "whitespace_flexible": False}}})


def of_lark(lark: str, *parts: Grammar) -> Grammar:
    """`parts` are named; the Lark grammar names them."""
    return Grammar({"lark_grammar": lark}, tuple(part for grammar in parts for part in grammar.parts))


def of_regex(regex: str) -> Grammar:
    """Raises: `ValueError` where it is none."""
    compiled: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(regex))
    return Grammar({"lark_grammar": compiled["grammars"][0]["lark_grammar"]})


def of_choice(choices: Sequence[str]) -> Grammar:
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return of_lark(f"start: {alternatives}")


def of_text(grammar: str, *, param: str) -> Grammar:
    """Of llguidance's Lark, or of llama.cpp's GBNF, which has a rule `root` instead of `start`.

    Raises: `InvalidField` where it is neither.
    """
    try:
        return of_lark(any_to_lark(grammar))
    except RecursionError:
        raise InvalidField(f"'{param}' is nested too deeply", param=param) from None
    except Exception as error:  # the converter raises nothing narrower
        raise InvalidField(f"'{param}' is neither a Lark grammar nor GBNF: {error}", param=param) from error
