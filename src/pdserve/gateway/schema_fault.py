"""Where in a JSON schema the reason lies that it can't be compiled. The compiler's messages don't say."""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from pdserve.gateway.grammar import Schema

_OF_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_OF_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_OF_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

_DEFINITIONS = ("$defs", "definitions")

Complaint = Callable[[Schema], str | None]
"""Why a schema can't be compiled; None where it can."""


def place_of_fault(schema: Schema, complaint: Complaint, *, max_probes: int) -> str:
    """The path, as in `.properties.age.type`, of what the compiler complains about; empty for the whole schema.

    It is the deepest subschema that draws the same complaint by itself, and the keyword without which it draws another.
    After `max_probes` compilations the path ends where the search is.
    """
    message = complaint(schema)
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    path = ""
    num_probes = 0
    current = schema
    found = True
    while found:
        found = False
        for step, child in _subschemas(current):
            num_probes += 1
            if num_probes > max_probes:
                break
            if complaint({**definitions, **child}) == message:
                path, current, found = path + step, child, True
                break
    keywords = sorted(current, key=lambda keyword: keyword == "type")
    for keyword in keywords[: max_probes - num_probes]:
        rest = {key: value for key, value in current.items() if key != keyword}
        if complaint({**definitions, **rest} if keyword not in _DEFINITIONS else rest) != message:
            return f"{path}.{keyword}"
    return path


def _subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for keyword in _OF_NAMED:
        named = schema.get(keyword)
        if isinstance(named, dict):
            yield from _objects({f".{keyword}.{key}": child for key, child in cast("dict[str, object]", named).items()})
    for keyword in _OF_LISTED:
        listed = schema.get(keyword)
        if isinstance(listed, list):
            children = enumerate(cast("list[object]", listed))
            yield from _objects({f".{keyword}[{index}]": child for index, child in children})
    yield from _objects({f".{keyword}": schema[keyword] for keyword in _OF_ONE if keyword in schema})


def _objects(children: Mapping[str, object]) -> Iterator[tuple[str, Schema]]:
    for step, child in children.items():
        if isinstance(child, dict):
            yield step, cast("dict[str, object]", child)
