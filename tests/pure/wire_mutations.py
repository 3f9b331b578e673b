"""Messages as a broken or hostile peer would send them: made from the types of the messages themselves, by seed."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

BOUNDARY_INTS = (0, 1, -1, 2**20, 2**31, -(2**31), 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
BOUNDARY_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-308, 1e308, math.inf, -math.inf, math.nan)
ODD_TEXTS = ("", "a", "\0", "\U0010ffff", "type", "x" * 300)
ODD_VALUES: tuple[Any, ...] = (None, True, 0, -1, 2**64 - 1, math.nan, "", b"", b"\xff", [], {}, [[]], {"type": "Join"})
MAX_ELEMENTS = 4
P_ODD_VALUE = 0.02
"""Of each value: a message has some tens of them, so about half keep their types."""

LYING_HEADERS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")
"""Of an array, a map, bytes and a string that claim 4 GiB."""


class Mutator:
    """What one seed sends to the receiver of one union of messages."""

    def __init__(
        self, union: object, rng: random.Random, *, known: Mapping[str, tuple[Any, ...]] | None = None
    ) -> None:
        """`known` has values of fields that make the receiver listen: they come half the time."""
        self._rng = rng
        self._known = known or {}
        self._messages = messages_of(union)
        self._tags = [str(message.tag) for message in self._messages]
        self._manglers: tuple[Callable[[bytes], bytes], ...] = (
            self._unchanged,
            self._unchanged,
            self._cut,
            self._flipped,
            self._spliced,
            self._lying,
            self._doubled,
        )

    def next(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.randbytes(rng.randrange(64))
        return rng.choice(self._manglers)(self._encoded())

    def _encoded(self) -> bytes:
        message = self._rng.choice(self._messages)
        value = self._fields(message)
        if self._rng.random() < 0.1:
            value["type"] = self._rng.choice([*self._tags, "Surprise", "", 7])
        return msgspec.msgpack.encode(value)

    # Bytes

    def _unchanged(self, encoded: bytes) -> bytes:
        return encoded

    def _cut(self, encoded: bytes) -> bytes:
        return encoded[: self._rng.randrange(len(encoded))]

    def _flipped(self, encoded: bytes) -> bytes:
        damaged = bytearray(encoded)
        for _ in range(self._rng.randint(1, 8)):
            damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
        return bytes(damaged)

    def _spliced(self, encoded: bytes) -> bytes:
        other = self._encoded()
        return encoded[: self._rng.randrange(len(encoded))] + other[self._rng.randrange(len(other)) :]

    def _lying(self, encoded: bytes) -> bytes:
        position = self._rng.randrange(len(encoded))
        return encoded[:position] + self._rng.choice(LYING_HEADERS) + encoded[position + 1 :]

    def _doubled(self, encoded: bytes) -> bytes:
        return encoded + encoded

    # Values

    def _fields(self, message: inspect.StructType) -> dict[str, Any]:
        value: dict[str, Any] = {} if message.tag is None else {str(message.tag_field): message.tag}
        for field in message.fields:
            if field.required or self._rng.random() < 0.7:
                value[field.encode_name] = self._field(field)
        return value

    def _field(self, field: inspect.Field) -> Any:
        known = self._known.get(field.name)
        if known is not None and self._rng.random() < 0.5:
            return self._rng.choice(known)
        return self._value(field.type)

    def _value(self, kind: inspect.Type) -> Any:
        rng = self._rng
        if rng.random() < P_ODD_VALUE:
            return rng.choice(ODD_VALUES)
        match kind:
            case inspect.StructType():
                return self._fields(kind)
            case inspect.UnionType():
                return self._value(rng.choice(kind.types))
            case inspect.VarTupleType():
                return [self._value(kind.item_type) for _ in range(rng.randrange(MAX_ELEMENTS))]
            case inspect.TupleType():
                return [self._value(item_type) for item_type in kind.item_types]
            case inspect.IntType():
                return rng.choice(BOUNDARY_INTS) if rng.random() < 0.5 else rng.randrange(100_000)
            case inspect.FloatType():
                return rng.choice(BOUNDARY_FLOATS)
            case inspect.StrType():
                return rng.choice(ODD_TEXTS)
            case inspect.BytesType():
                return rng.randbytes(rng.randrange(16))
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.EnumType():
                return rng.choice(list(kind.cls)).value
            case _:
                raise NotImplementedError(f"no values of {kind} are made here yet")


def messages_of(union: object) -> list[inspect.StructType]:
    kind = inspect.type_info(union)
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [message for message in kinds if isinstance(message, inspect.StructType)]


def crammed(kind: inspect.Type, *, num_elements: int) -> Iterator[Any]:
    """Least values of a type, each with one of its sequences long: what takes the most memory for its bytes."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                for value in crammed(field.type, num_elements=num_elements):
                    yield {**least(kind), field.encode_name: value}
        case inspect.UnionType():
            for one in kind.types:
                yield from crammed(one, num_elements=num_elements)
        case inspect.VarTupleType():
            yield [least(kind.item_type)] * num_elements
            for value in crammed(kind.item_type, num_elements=num_elements):
                yield [value]
        case _:
            return


def least(kind: inspect.Type) -> Any:
    """The value of a type that takes the fewest bytes."""
    match kind:
        case inspect.StructType():
            tag = {} if kind.tag is None else {str(kind.tag_field): kind.tag}
            return tag | {field.encode_name: least(field.type) for field in kind.fields if field.required}
        case inspect.UnionType():
            return None if kind.includes_none else least(kind.types[0])
        case inspect.VarTupleType():
            return []
        case inspect.TupleType():
            return [least(item_type) for item_type in kind.item_types]
        case inspect.IntType() | inspect.FloatType():
            return 0
        case inspect.StrType():
            return ""
        case inspect.BytesType():
            return b""
        case inspect.BoolType():
            return False
        case inspect.NoneType():
            return None
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case _:
            raise NotImplementedError(f"no values of {kind} are made here yet")
