"""What the handoffs of a load showed of their overlap with compute, from a sample that was traced."""

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import aiohttp

from pdserve.bench.api_client import Answer, ApiClient
from pdserve.bench.handoff_trace import HandoffFigures, HandoffTrace, collect, figures
from pdserve.errors import PdserveError

NUM_TRACED = 16
"""Requests of a load; a worker remembers 64."""
COLLECT_TIMEOUT_S = 10.0
"""Of one trace, from all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedHandoff:
    trace: HandoffTrace
    figures: HandoffFigures


async def collect_handoffs(
    client: ApiClient, session: aiohttp.ClientSession, answers: Iterable[Answer], *, secret: str | None
) -> list[TracedHandoff]:
    """Of those answers that were whole and handed over; none where the workers can't be asked from here."""
    found: list[TracedHandoff] = []
    for answer in answers:
        if answer.finish_reason is None or not answer.token_ns:
            continue
        try:
            async with asyncio.timeout(COLLECT_TIMEOUT_S):
                trace = await collect(client, session, answer, secret=secret)
            found.append(TracedHandoff(trace=trace, figures=figures(trace)))
        except PdserveError:
            continue  # prefilled where it was decoded
        except (aiohttp.ClientError, TimeoutError):
            return found
    return found


def handoff_summary(handoffs: Sequence[TracedHandoff]) -> dict[str, float]:
    """Empty without handoffs. All writes but the tail are of one size, so a share of writes is one of bytes."""
    if not handoffs:
        return {}
    exposed_s = [each.figures.exposed_s for each in handoffs]
    hidden = [each.figures.landed_before_end_share for each in handoffs]
    return {
        "num_traced": float(len(handoffs)),
        "exposed_s_p50": statistics.median(exposed_s),
        "exposed_s_max": max(exposed_s),
        "hidden_share_mean": statistics.fmean(hidden),
        "hidden_share_min": min(hidden),
    }


def longest_trace(handoffs: Sequence[TracedHandoff]) -> HandoffTrace | None:
    """Of the longest prompt, which has most to show."""
    longest = max(handoffs, key=lambda each: each.figures.num_tokens, default=None)
    return None if longest is None else longest.trace
