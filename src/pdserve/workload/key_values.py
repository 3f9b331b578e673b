"""`key=value,key=value`: how a text has several figures."""

from collections.abc import Collection

from pdserve.errors import ConfigError


def key_values(
    text: str, *, subject: str, known: Collection[str], example: str, needed: Collection[str] = ()
) -> dict[str, str]:
    """The values by their keys. `subject` is what errors call the text.

    Raises: `ConfigError` for a key that is not known, is there twice, or is needed and missing.
    """
    values: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in known:
            raise ConfigError(f"{item!r} is no part of {subject}; it knows {', '.join(known)}, as in {example}")
        if key in values:
            raise ConfigError(f"{subject} has {key!r} twice")
        values[key] = value
    missing = [key for key in needed if key not in values]
    if missing:
        raise ConfigError(f"{subject} needs {', '.join(missing)}, as in {example}")
    return values
