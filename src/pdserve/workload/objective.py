"""What an operator asks of each request: `ttft=2,tpot=0.05,stall=1`, in seconds."""

import math
from collections.abc import Collection

import msgspec

from pdserve.errors import ConfigError
from pdserve.workload.key_values import key_values

LIMITS = ("ttft", "tpot", "stall")


class Objective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request must meet to count as good. None: not asked for."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    """The mean of the request."""
    stall_s: float | None = None
    """The longest gap between two tokens."""


def parse_objective(text: str, *, limits: Collection[str] = LIMITS) -> Objective:
    """Requires: `limits`, which may be in it, are some of `LIMITS`.

    Raises: `ConfigError` for another limit, and for one that nothing can meet.
    """
    values = key_values(text, subject="an objective", known=limits, example="ttft=2")
    return Objective(**{f"{key}_s": _seconds(key, value) for key, value in values.items()})


def _seconds(key: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"an objective of {key}={text} can't be met: it must be seconds, over 0")
    return seconds
