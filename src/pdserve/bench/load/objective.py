"""What an operator asks of each request: `ttft=2,tpot=0.05,stall=1`, in seconds."""

import math

from pdserve.bench.load.result import Objective
from pdserve.errors import ConfigError

LIMITS = {"ttft": "ttft_s", "tpot": "tpot_s", "stall": "stall_s"}


def parse_objective(text: str) -> Objective:
    """Raises: `ConfigError` for an unknown limit, and for one that nothing can meet."""
    found: dict[str, float] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in LIMITS:
            raise ConfigError(f"{item!r} is no limit of an objective; it knows {', '.join(LIMITS)}, as in ttft=2")
        if LIMITS[key] in found:
            raise ConfigError(f"the objective has {key!r} twice")
        found[LIMITS[key]] = _seconds(key, value)
    return Objective(**found)


def _seconds(key: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"an objective of {key}={text} can't be met: it must be seconds, over 0")
    return seconds
