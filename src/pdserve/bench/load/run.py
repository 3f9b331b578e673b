"""One load from its first request to its result."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_trace import HandoffTrace
from pdserve.bench.load.disturbance import disturbance_between, read_counters
from pdserve.bench.load.handoffs import NUM_TRACED, collect_handoffs, handoff_summary, longest_trace
from pdserve.bench.load.pools import PoolReading, busy_shares, read_pools
from pdserve.bench.load.progress import show_progress
from pdserve.bench.load.prompts import Prompts
from pdserve.bench.load.result import LoadResult
from pdserve.bench.load.sender import Sender, SendLimits
from pdserve.bench.load.summary import summarise
from pdserve.bench.load.target import Target
from pdserve.bench.provenance import this_commit, this_instant, this_machine
from pdserve.workload.objective import Objective
from pdserve.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    result: LoadResult
    trace: HandoffTrace | None
    """One request's handoff, where there was one."""


class LoadRunner:
    """Sends loads to one server. Lifetime: of the session."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        target: Target,
        *,
        max_in_flight: int,
        deadline_s: float,
        api_key: str | None,
        secret: str | None,
    ) -> None:
        self._session = session
        self._client = ApiClient(session, url, api_key=api_key)
        self._target = target
        self._secret = secret
        self._limits = SendLimits(
            max_in_flight=max_in_flight,
            deadline_s=deadline_s,
            num_traced=NUM_TRACED if target.is_pdserve else 0,
        )

    async def run(
        self,
        requests: Sequence[WorkloadRequest],
        stop: asyncio.Event,
        *,
        objective: Objective,
        seed: int,
        configuration: Mapping[str, str],
    ) -> Finished:
        """`stop` cuts it short. Requires: requests."""
        sender = Sender(self._client, self._target, Prompts(self._target.token_ids, seed=seed), self._limits)
        started = this_instant()
        pools, machine = await self._read_pools(), read_counters()
        progress = asyncio.create_task(show_progress(sender, requests, sys.stderr))
        try:
            sent = await sender.send(requests, stop)
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        disturbance, busy = disturbance_between(machine, read_counters()), busy_shares(pools, await self._read_pools())
        handoffs = await collect_handoffs(self._client, self._session, sender.traced, secret=self._secret)
        cut_short = {"cut short": f"after {len(sent)} of {len(requests)} requests"} if stop.is_set() else {}
        result = LoadResult(
            commit=this_commit(),
            machine=this_machine(),
            started=started,
            configuration={**configuration, **cut_short},
            objective=objective,
            summary=summarise(sent, objective),
            disturbance=disturbance,
            pools=busy,
            handoff=handoff_summary(handoffs),
            requests=tuple(sent),
        )
        return Finished(result=result, trace=longest_trace(handoffs))

    async def _read_pools(self) -> PoolReading | None:
        if not self._target.is_pdserve:
            return None
        return await read_pools(self._client, self._session, secret=self._secret)
