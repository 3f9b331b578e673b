"""Twenty JSON schemas of the kinds that people send, each with a bounded document."""

from typing import Any

_WORD: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 12}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 999}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """All properties required, no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], *, most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_TREE: dict[str, Any] = {
    "$defs": {
        "leaf": _object(name=_WORD),
        "branch": _object(name=_WORD, leaves=_list({"$ref": "#/$defs/leaf"}, most=3)),
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/branch"}},
    "required": ["root"],
    "additionalProperties": False,
}

SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(name=_WORD, age=_COUNT, is_sailor={"type": "boolean"}),
    _object(answer={"enum": ["yes", "no", "maybe"]}),
    _object(kind={"const": "boat"}, name=_WORD),
    _list(_COUNT, most=6, least=2),
    _list(_WORD, most=4),
    _object(tags=_list(_WORD, most=3, least=1), count=_COUNT),
    _object(position=_object(x=_COUNT, y=_COUNT), label=_WORD),
    _object(value={"anyOf": [_COUNT, _WORD, {"type": "null"}]}),
    _object(day={"type": "string", "pattern": "^(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]$"}),
    _object(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}),
    _object(born={"type": "string", "format": "date"}),
    _object(id={"type": "string", "format": "uuid"}),
    _object(price={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100}),
    {
        "type": "object",
        "properties": {"name": _WORD, "nick": _WORD},
        "required": ["name"],
        "additionalProperties": False,
    },
    {"oneOf": [_object(boat=_WORD), _object(port=_WORD)]},
    _TREE,
    {"enum": ["calm", 3, None, True, {"sea": "rough"}]},
    _object(crew=_list(_object(name=_WORD, rank={"enum": ["mate", "cook"]}), most=3)),
    {"type": "array", "prefixItems": [_WORD, _COUNT], "items": False, "minItems": 2},
    _object(is_open={"type": "boolean"}, note={"type": ["string", "null"], "maxLength": 10}),
)
