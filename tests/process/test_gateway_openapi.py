"""The OpenAPI document against the gateway that it describes: no 5xx, and nothing that it does not declare."""

import asyncio
import sys
from pathlib import Path

from aiohttp import web
from tests.process.gateway_under_test import SETTINGS, ByteTokenizer, gateway
from tests.process.scripted_worker import ScriptedWorker, join_message, joined

from pdserve.gateway.app import build_app
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FinishReason, Generate, TokenEntry

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
NUM_EXAMPLES = 40
TIMEOUT_S = 150.0

UNDOCUMENTED = {
    *("/health", "/ready", "/live", "/metrics", "/version", "/workers", "/cluster", "/openapi.json"),
    "/debug/ledger",
}
"""For operators and workers, not for clients."""


async def test_gateway_documents_every_route_for_clients() -> None:
    async with gateway() as running:
        _, document = await running.get("/openapi.json")
    app = build_app(SETTINGS, ByteTokenizer())
    routes = {_path(route) for route in app.router.routes()} - UNDOCUMENTED
    assert routes == set(document["paths"])


async def test_schemathesis_finds_no_server_error_and_nothing_undeclared(tmp_path: Path) -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), answering_all):
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


async def answering_all(worker: ScriptedWorker, generate: Generate) -> None:
    """One token for each choice, with all the logprobs that are asked for."""
    logprobs = TokenLogprobs(token_id=65, logprob=-1.0, top=((65, -1.0),))
    sampling = generate.sampling
    if sampling.num_prompt_logprobs is not None:
        of_prompt = (logprobs,) * (len(generate.prompt_token_ids) - 1)
        worker.deltas(Delta(request_id=generate.request_id, token_ids=(), text="", prompt_logprobs=of_prompt))
    entries = () if sampling.num_top_logprobs is None else (TokenEntry(text_offset=0, logprobs=logprobs),)
    worker.deltas(
        *(
            Delta(
                request_id=generate.request_id,
                choice_index=choice_index,
                token_ids=(65,),
                text="A",
                entries=entries,
                finish_reason=FinishReason.STOP,
            )
            for choice_index in range(generate.num_choices)
        )
    )


def _path(route: web.AbstractRoute) -> str:
    assert route.resource is not None
    return route.resource.canonical
