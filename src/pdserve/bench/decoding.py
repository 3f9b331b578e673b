"""Decode throughput: with and without speculation, with and without a grammar, one worker on one core.

Every arm generates the same number of tokens for the same prompts, in turn, several times.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_check import Guesses, Prober
from pdserve.errors import InternalError
from pdserve.units import NS_PER_S

NUM_TOKENS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that are sent at once."""

    name: str
    prompts: tuple[str, ...]
    fields: dict[str, Any]

    @property
    def num_streams(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, sent once."""

    tokens_per_s: float
    """Of all streams together, from the last first token to the first last one: all of them decode, none prefills."""
    guesses: Guesses
    token_ids: tuple[tuple[int, ...], ...]
    """By prompt."""


class DecodingRow(msgspec.Struct, frozen=True, kw_only=True):
    load: str
    arm: str
    num_streams: int
    tokens_per_s: float
    """Median of the repetitions."""
    tokens_per_s_min: float
    tokens_per_s_max: float
    ratio: float | None
    """To the first arm: the median of the repetitions' ratios."""
    acceptance: float | None
    """Accepted of all guesses; None where there was none."""
    guesses_per_token: float
    num_repetitions: int


async def measure(client: ApiClient, prober: Prober, load: Load) -> Run:
    """Requires: one worker, which nobody else uses."""
    before = await prober.guesses()
    answers = await asyncio.gather(
        *(client.complete(prompt, max_tokens=NUM_TOKENS, **load.fields) for prompt in load.prompts)
    )
    after = await prober.guesses()
    start_ns = max(answer.token_ns[0] for answer in answers)
    stop_ns = min(answer.token_ns[-1] for answer in answers)
    if stop_ns <= start_ns:
        raise InternalError(f"the streams of {load.name!r} were never all decoding at once: raise the tokens of each")
    num_tokens = sum(start_ns < token_ns <= stop_ns for answer in answers for token_ns in answer.token_ns)
    return Run(
        tokens_per_s=num_tokens * NS_PER_S / (stop_ns - start_ns),
        guesses=after.since(before),
        token_ids=tuple(tuple(answer.token_ids) for answer in answers),
    )


def rows_of(load: Load, runs: dict[str, Sequence[Run]]) -> list[DecodingRow]:
    """`runs` by arm, one a repetition, in the same order; the first arm is what the others are compared with."""
    reference = next(iter(runs.values()))
    return [_row(load, arm, found, None if found is reference else reference) for arm, found in runs.items()]


def _row(load: Load, arm: str, runs: Sequence[Run], reference: Sequence[Run] | None) -> DecodingRow:
    speeds = [run.tokens_per_s for run in runs]
    num_drafts = sum(run.guesses.num_tried for run in runs)
    num_tokens = sum(len(token_ids) for run in runs for token_ids in run.token_ids)
    ratios = [run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, reference or (), strict=False)]
    return DecodingRow(
        load=load.name,
        arm=arm,
        num_streams=load.num_streams,
        tokens_per_s=statistics.median(speeds),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
        ratio=statistics.median(ratios) if ratios else None,
        acceptance=sum(run.guesses.num_accepted for run in runs) / num_drafts if num_drafts else None,
        guesses_per_token=num_drafts / num_tokens,
        num_repetitions=len(runs),
    )
