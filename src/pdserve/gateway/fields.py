"""From a body's bytes to a typed request: what is wrong, unknown or not supported is refused by the field's name."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import msgspec

from pdserve.errors import InvalidField, UnsupportedField

T = TypeVar("T")

NoOps = Mapping[str, Sequence[object]]
"""Fields that are known elsewhere but not supported here, and the values that ask for nothing; null always does."""

_LOCATION = re.compile(r"^(?P<message>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED_FIELD = re.compile(r"(?:unknown field|required field) `(?P<name>.*)`$", re.DOTALL)


def parse_object(body: bytes) -> dict[str, object]:
    """Raises: `InvalidField` when the body is no JSON object."""
    try:
        parsed: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"the body is no valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidField("the body must be a JSON object")
    return cast("dict[str, object]", parsed)


def without_no_ops(fields: Mapping[str, object], no_ops: NoOps, *, location: str = "") -> dict[str, object]:
    """The fields that are left to convert.

    Raises: `UnsupportedField` when one of `no_ops` asks for something.
    """
    kept: dict[str, object] = {}
    for name, value in fields.items():
        if name not in no_ops:
            kept[name] = value
        elif value is not None and not any(_same(value, no_op) for no_op in no_ops[name]):
            raise UnsupportedField(
                f"'{location}{name}' is not supported with this value; leave it out", param=location + name
            )
    return kept


def convert(fields: Mapping[str, object], wanted: type[T]) -> T:
    """Raises: `InvalidField` that names the first field with a wrong type or value, or that is unknown or missing."""
    try:
        return msgspec.convert(fields, wanted)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from error


def _same(value: object, no_op: object) -> bool:
    """Equal and of one type: `0` is not `False`, where JSON tells them apart."""
    return type(value) is type(no_op) and value == no_op


def _invalid_field(report: str) -> InvalidField:
    located = _LOCATION.match(report)
    message, path = (located["message"], located["path"] or "") if located else (report, "")
    named = _NAMED_FIELD.search(message)
    param = f"{path}.{named['name']}" if named else path
    param = param.removeprefix(".") or None
    return InvalidField(f"{param}: {message}" if param else message, param=param)
