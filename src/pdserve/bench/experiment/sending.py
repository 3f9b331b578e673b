"""Sends one run's load, plainly: no traces, no progress, nothing that the arms could feel differently."""

import asyncio
from collections.abc import Sequence

import aiohttp

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.load.prompts import Prompts
from pdserve.bench.load.result import SentRequest
from pdserve.bench.load.sender import Sender, SendLimits
from pdserve.bench.load.target import look_at
from pdserve.config import environment
from pdserve.workload.request import WorkloadRequest


async def send_load(url: str, requests: Sequence[WorkloadRequest], seed: int) -> list[SentRequest]:
    """Each when it is due, with prompts drawn from the seed; returns when the last has ended.

    Raises: `ConfigError` when no server is there.
    """
    key = environment.api_key()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        target = await look_at(session, url, model=None, api_key=key, text=NATURAL_TEXT.read_text())
        prompts = Prompts(target.token_ids, seed=seed)
        sender = Sender(ApiClient(session, url, api_key=key), target, prompts, SendLimits())
        return await sender.send(requests, asyncio.Event())
