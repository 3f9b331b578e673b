"""The OpenAPI document against the gateway that it describes: no 5xx, and no status or body that it does not declare."""

import asyncio
import sys
from pathlib import Path

from aiohttp import web

from pdserve.gateway.app import build_app
from tests.process.gateway_under_test import SETTINGS, ByteTokenizer, gateway
from tests.process.scripted_worker import answering_worker

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
NUM_EXAMPLES = 40
TIMEOUT_S = 150.0

UNDOCUMENTED = {"/health", "/ready", "/live", "/metrics", "/version", "/workers", "/cluster", "/openapi.json"}
"""For operators and workers, not for clients."""


async def test_gateway_documents_every_route_for_clients() -> None:
    async with gateway() as running:
        _, document = await running.get("/openapi.json")
    app = build_app(SETTINGS, ByteTokenizer())
    routes = {_path(route) for route in app.router.routes()} - UNDOCUMENTED
    assert routes == set(document["paths"])


async def test_schemathesis_finds_no_server_error_and_nothing_undeclared(tmp_path: Path) -> None:
    async with gateway() as running, scripted_worker(running):
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("schemathesis"),
            "run",
            f"{running.url}/openapi.json",
            f"--checks={CHECKS}",
            f"--max-examples={NUM_EXAMPLES}",
            "--phases=examples,coverage,fuzzing",
            "--seed=1",
            "--generation-database=none",
            "--suppress-health-check=all",
            "--request-timeout=20",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


def _path(route: web.AbstractRoute) -> str:
    assert route.resource is not None
    return route.resource.canonical
