"""Loads of equal requests that come at random: `prompt=256,output=64,rate=0.5`."""

import math
from dataclasses import dataclass

from pdserve.errors import ConfigError
from pdserve.workload.arrivals import MOST_CV, arrivals_s
from pdserve.workload.key_values import key_values
from pdserve.workload.request import WorkloadRequest

SHARED_PREFIX = 0
"""The name of the one block that all prompts of a load begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """Requires: positive lengths and rate, `0 <= cv <= MOST_CV`, a prefix no longer than the prompt."""

    num_prompt_tokens: int
    num_output_tokens: int
    rate_per_s: float
    cv: float = 1.0
    """Of the gaps between arrivals: 0 a steady beat, 1 Poisson, more comes in bursts."""
    seed: int = 0
    num_prefix_tokens: int = 0
    """With which all prompts begin alike."""

    def requests(self, num_requests: int) -> list[WorkloadRequest]:
        """The first requests of the load, by arrival."""
        has_prefix = self.num_prefix_tokens > 0
        return [
            WorkloadRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=self.num_prompt_tokens,
                num_output_tokens=self.num_output_tokens,
                prefix_blocks=(SHARED_PREFIX,) if has_prefix else (),
                block_tokens=self.num_prefix_tokens,
            )
            for arrival_s in arrivals_s(
                num_requests=num_requests, rate_per_s=self.rate_per_s, cv=self.cv, seed=self.seed
            )
        ]


NEEDED_KEYS = ("prompt", "output", "rate")
OPTIONAL_KEYS = ("cv", "seed", "prefix")


def parse_synthetic(text: str, *, default_seed: int = 0) -> SyntheticWorkload:
    """Reads `prompt=256,output=64,rate=0.5` with `cv=`, `seed=` and `prefix=` where they are given.

    Raises: `ConfigError`.
    """
    values = key_values(
        text,
        subject="a synthetic workload",
        known=NEEDED_KEYS + OPTIONAL_KEYS,
        needed=NEEDED_KEYS,
        example="prompt=256,output=64,rate=0.5",
    )
    workload = SyntheticWorkload(
        num_prompt_tokens=_whole(values, "prompt", least=1),
        num_output_tokens=_whole(values, "output", least=1),
        rate_per_s=_real(values, "rate"),
        cv=_real(values, "cv") if "cv" in values else 1.0,
        seed=_whole(values, "seed", least=0) if "seed" in values else default_seed,
        num_prefix_tokens=_whole(values, "prefix", least=0) if "prefix" in values else 0,
    )
    if workload.rate_per_s == 0:
        raise ConfigError("a synthetic workload's rate is in requests a second and must be over 0")
    if workload.cv > MOST_CV:
        raise ConfigError(f"a synthetic workload's cv is the variation of its gaps and must be {MOST_CV:g} or less")
    if workload.num_prefix_tokens > workload.num_prompt_tokens:
        raise ConfigError(
            f"the prefix of {workload.num_prefix_tokens} tokens is longer than the prompt of "
            f"{workload.num_prompt_tokens}, which it is the beginning of"
        )
    return workload


def _whole(values: dict[str, str], key: str, *, least: int) -> int:
    text = values[key]
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"{key}={text} of a synthetic workload must be a whole number of {least} or more")
    return int(text)


def _real(values: dict[str, str], key: str) -> float:
    try:
        number = float(values[key])
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{key}={values[key]} of a synthetic workload must be a number of 0 or more")
    return number
