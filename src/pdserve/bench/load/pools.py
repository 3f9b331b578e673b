"""How busy each pool of workers was, from what the workers count."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from pdserve.bench.api_client import ApiClient
from pdserve.bench.exposition import metric_total
from pdserve.wire.bearer import bearer_headers

PASS_SECONDS = "pdserve:pass_seconds_total"
READ_TIMEOUT_S = 10.0
"""For all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReading:
    """At one instant, by worker."""

    instant_s: float
    roles: Mapping[str, str]
    num_ranks: Mapping[str, int]
    pass_s: Mapping[str, float]
    """In forward passes, over all data parallel ranks of the worker, since it started."""


async def read_pools(client: ApiClient, session: aiohttp.ClientSession, *, secret: str | None) -> PoolReading | None:
    """None where the workers can't be asked from here: no secret, or no way to them."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read(client, session, bearer_headers(secret))
    except (aiohttp.ClientError, TimeoutError):
        return None


async def _read(client: ApiClient, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> PoolReading:
    roles: dict[str, str] = {}
    num_ranks: dict[str, int] = {}
    pass_s: dict[str, float] = {}
    instant_s = time.monotonic()
    for worker in await client.workers():
        async with session.get(f"{worker['url']}/metrics", headers=headers) as response:
            response.raise_for_status()
            found = metric_total(await response.text(), PASS_SECONDS)
        name = worker["worker_id"]
        roles[name], num_ranks[name], pass_s[name] = worker["role"], len(worker["ranks"]), found
    return PoolReading(instant_s=instant_s, roles=roles, num_ranks=num_ranks, pass_s=pass_s)


def busy_shares(before: PoolReading | None, after: PoolReading | None) -> dict[str, float]:
    """By role, of the time between: 1 is a pool whose ranks were all in passes all of it.

    Workers that were not there at both ends do not count.
    """
    if before is None or after is None or after.instant_s <= before.instant_s:
        return {}
    busy_s: defaultdict[str, float] = defaultdict(float)
    available_s: defaultdict[str, float] = defaultdict(float)
    for name in before.pass_s.keys() & after.pass_s.keys():
        busy_s[after.roles[name]] += max(0.0, after.pass_s[name] - before.pass_s[name])
        available_s[after.roles[name]] += after.num_ranks[name] * (after.instant_s - before.instant_s)
    return {role: min(1.0, busy_s[role] / available_s[role]) for role in sorted(busy_s) if available_s[role]}
