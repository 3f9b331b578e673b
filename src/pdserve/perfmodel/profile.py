"""The file that a profile is kept in: what was measured, from where each number comes, and the model fitted to it."""

from pathlib import Path
from typing import Annotated

import msgspec

from pdserve.errors import ConfigError
from pdserve.perfmodel.fit import Accuracy
from pdserve.perfmodel.fitted import FittedModel
from pdserve.perfmodel.sample import PassSample, PushSample

FORMAT_VERSION = 1


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where numbers come from, well enough to doubt and to repeat them."""

    made_by: str
    """The command that measured them, or the package and version that knows them."""
    date: str
    """ISO 8601, in UTC."""
    machine: str
    """Processor or accelerator, and what else the times depend on."""
    commit: str | None = None
    """Of the sources, where they were measured with them."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=1)] = FORMAT_VERSION
    subject: str
    """Model, sharding and hardware, in words."""
    sources: dict[str, Source]
    passes: tuple[PassSample, ...]
    pushes: tuple[PushSample, ...]
    model: FittedModel
    accuracy: Accuracy


def encode_profile(profile: Profile) -> bytes:
    """A document for people to read too. Ensures: `decode_profile` gives the same profile back."""
    return msgspec.json.format(msgspec.json.encode(profile)) + b"\n"


def decode_profile(document: bytes, *, name: str) -> Profile:
    """`name` is what errors call it. Raises: `ConfigError` for anything else than a whole profile of this version."""
    try:
        version = msgspec.json.decode(document, type=_Versioned).version
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{name} has format version {version}, this program reads {FORMAT_VERSION}; measure again with "
                "`pdserve profile`"
            )
        profile = msgspec.json.decode(document, type=Profile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} is no profile: {error}; write one with `pdserve profile`") from error
    _check_samples(profile, name=name)
    return profile


def read_profile(path: Path) -> Profile:
    """Raises: `ConfigError`, also when there is no such file."""
    try:
        document = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    return decode_profile(document, name=str(path))


def _check_samples(profile: Profile, *, name: str) -> None:
    for sample in (*profile.passes, *profile.pushes):
        if sample.source not in profile.sources:
            raise ConfigError(f"{name}: a sample names the source '{sample.source}', which is not in 'sources'")
        if not 0 < sample.seconds < float("inf"):
            raise ConfigError(f"{name}: a sample took {sample.seconds} s; a time is positive and finite")


class _Versioned(msgspec.Struct, frozen=True):
    """As much of a document as any version has."""

    version: int
