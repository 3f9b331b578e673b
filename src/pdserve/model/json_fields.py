"""Typed access to the settings of a `config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pdserve.errors import ConfigError


class JsonFields:
    """A JSON object; what is missing or of a wrong type is a `ConfigError` with the field's name."""

    def __init__(self, fields: Mapping[str, object], *, path: Path) -> None:
        self._fields = fields
        self.path = path

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def integer(self, name: str) -> int:
        value = self._fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refusal(f"{name} must be a positive integer, not {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if self.has(name) else None

    def count(self, name: str, *, default: int) -> int:
        """May be 0."""
        return 0 if self._fields.get(name) == 0 else (self.optional_integer(name) or default)

    def integers(self, name: str) -> tuple[int, ...]:
        """Empty when there are none."""
        value = self._fields.get(name)
        if value is None:
            return ()
        items = cast(list[object], value) if isinstance(value, list) else [value]
        integers = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))
        if not isinstance(value, list) or len(integers) != len(items):
            raise self.refusal(f"{name} must be a list of integers, not {value!r}")
        return integers

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self._fields.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refusal(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def text(self, name: str, *, default: str) -> str:
        return str(self._fields.get(name, default))

    def texts(self, name: str) -> tuple[str, ...]:
        """Empty when there is no list."""
        value = self._fields.get(name)
        return tuple(str(item) for item in cast(list[object], value)) if isinstance(value, list) else ()

    def flag(self, name: str, *, default: bool = False) -> bool:
        return bool(self._fields.get(name, default))

    def section(self, name: str) -> "JsonFields | None":
        value = self._fields.get(name)
        return JsonFields(cast(Mapping[str, object], value), path=self.path) if isinstance(value, dict) else None

    def choice(self, name: str, *, known: tuple[str, ...], default: str) -> str:
        """The value of a setting of which only the `known` values are implemented."""
        value = self.text(name, default=default)
        if value not in known:
            raise self.refusal(f"{name} {value!r} is not supported; known are {', '.join(map(repr, known))}")
        return value

    def refusal(self, message: str) -> ConfigError:
        return ConfigError(f"{self.path}: {message}")
