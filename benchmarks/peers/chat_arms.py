"""The setups that the chats are compared on: the same two cores, one process or worker with one thread on each."""

import itertools
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import assert_never

import msgspec
from chat_load import Route, unlimited_session
from chat_routes import PullRoute, SpreadRoute
from vllm_server import vllm_server

from pdserve.bench.procfs import descendants_of, process_stats
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment
from pdserve.model.source import ModelSource

NIXL_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


class Arm(Enum):
    PDSERVE_COLOCATED = "pdserve-colocated"
    PDSERVE_APART = "pdserve-apart"
    VLLM_COLOCATED = "vllm-colocated"
    VLLM_APART = "vllm-apart"
    """With NixlConnector as shipped, which moves the thread that computes to the last core, in both servers."""
    VLLM_APART_REPINNED = "vllm-apart-repinned"
    """The same, its threads moved back to a core for each server once they run."""


DEFAULT_ARMS = (Arm.PDSERVE_COLOCATED, Arm.PDSERVE_APART, Arm.VLLM_COLOCATED, Arm.VLLM_APART)

STARTS_S = {
    Arm.PDSERVE_COLOCATED: 15.0,
    Arm.PDSERVE_APART: 15.0,
    Arm.VLLM_COLOCATED: 80.0,
    Arm.VLLM_APART: 80.0,
    Arm.VLLM_APART_REPINNED: 80.0,
}
"""About what starting, warming up and stopping take on a quiet machine; once vLLM has compiled its kernels."""


@asynccontextmanager
async def started(arm: Arm, source: ModelSource, cpus: tuple[int, int]) -> AsyncGenerator[Route]:
    """A route to the arm's servers. Raises: `PdserveError` when one does not start."""
    match arm:
        case Arm.PDSERVE_COLOCATED:
            servers = pdserve(source, cpus, is_apart=False)
        case Arm.PDSERVE_APART:
            servers = pdserve(source, cpus, is_apart=True)
        case Arm.VLLM_COLOCATED:
            servers = vllm_colocated(cpus)
        case Arm.VLLM_APART:
            servers = vllm_apart(cpus, repins=False)
        case Arm.VLLM_APART_REPINNED:
            servers = vllm_apart(cpus, repins=True)
        case _:
            assert_never(arm)
    async with servers as route:
        yield route


@asynccontextmanager
async def pdserve(source: ModelSource, cpus: tuple[int, int], *, is_apart: bool) -> AsyncGenerator[Route]:
    """As `pdserve serve` starts it, all flags at their defaults."""
    request = DeploymentRequest(
        num_prefill=int(is_apart),
        num_decode=int(is_apart),
        num_colocated=0 if is_apart else 2,
        available_cpus=cpus,
    )
    settings = DeploymentSettings(model_dir=str(source.dir), model_name=source.name, places=place_workers(request))
    async with LocalDeployment(settings) as deployment, unlimited_session() as session:
        yield SpreadRoute(session, [deployment.url])


@asynccontextmanager
async def vllm_colocated(cpus: tuple[int, int]) -> AsyncGenerator[Route]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(vllm_server(cpu, name=f"colocated-{cpu}")) for cpu in cpus]
        for server in servers:
            await server.wait_healthy()
        session = await stack.enter_async_context(unlimited_session())
        yield SpreadRoute(session, [server.url for server in servers])


@asynccontextmanager
async def vllm_apart(cpus: tuple[int, int], *, repins: bool) -> AsyncGenerator[Route]:
    flags = ("--kv-transfer-config", msgspec.json.encode(NIXL_CONNECTOR).decode())
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(vllm_server(cpu, flags, name=f"apart-{role}"))
            for cpu, role in zip(cpus, ("prefill", "decode"), strict=True)
        ]
        for cpu, server in zip(cpus, servers, strict=True):
            await server.wait_healthy()
            if repins:
                pin_threads(server.process.pid, cpu)
        session = await stack.enter_async_context(unlimited_session())
        yield PullRoute(session, prefill_url=servers[0].url, decode_url=servers[1].url)


def pin_threads(pid: int, cpu: int) -> None:
    """All that a process and its descendants have now, whatever they were pinned to."""
    pids = [pid, *descendants_of(pid, process_stats())]
    for thread in itertools.chain.from_iterable(Path(f"/proc/{each}/task").glob("*") for each in pids):
        os.sched_setaffinity(int(thread.name), {cpu})
