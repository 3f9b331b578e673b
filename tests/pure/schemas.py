"""Twenty JSON schemas as people write them."""

from typing import Any

_POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]}
_STRING = {"type": "string", "maxLength": 12}

SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer"},
    "bounded": {"type": "integer", "minimum": 3, "maximum": 17},
    "number": {"type": "number", "minimum": -1, "exclusiveMaximum": 1},
    "string": _STRING,
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "const": {"const": {"kind": "point", "at": [0, 1.5]}},
    "nullable": {"type": ["boolean", "null"]},
    "point": {**_POINT, "additionalProperties": False},
    "person": {
        "type": "object",
        "properties": {
            "name": _STRING,
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, _STRING], "minItems": 2, "items": False},
    "any-of": {"anyOf": [{"type": "integer"}, _POINT | {"additionalProperties": False}]},
    "all-of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "definitions": {
        "$defs": {"point": _POINT | {"additionalProperties": False}},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "maxItems": 2,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "nested": {
        "type": "object",
        "properties": {
            "order": {
                "type": "object",
                "properties": {"id": {"type": "integer"}, "lines": {"type": "array", "items": _POINT, "maxItems": 2}},
                "required": ["id", "lines"],
                "additionalProperties": False,
            }
        },
        "required": ["order"],
        "additionalProperties": False,
    },
}
