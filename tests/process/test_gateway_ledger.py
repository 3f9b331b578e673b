"""The gateway's ledger: whose requests are open, who has them, and who may ask."""

import asyncio
from contextlib import suppress

from tests.process.gateway_under_test import RunningGateway, gateway, until
from tests.process.scripted_worker import join_message, joined, silent, starting


async def status_of(running: RunningGateway, *, secret: str | None) -> int:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    async with running.session.get(f"{running.url}/debug/ledger", headers=headers) as response:
        return response.status


async def test_ledger_of_an_idle_gateway_shows_leases_and_nothing_leaked() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        status, ledger = await running.get("/debug/ledger")
        assert (status, ledger["requests"], ledger["leaks"]) == (200, [], [])
        (lease,) = ledger["leases"]
        assert (lease["worker_id"], lease["role"], lease["incarnation"]) == ("d0", "decode", "1")
        assert lease["age_s"] >= 0 and 0 < lease["lease_left_s"] <= 2
        for kind in ("requests", "streams"):
            assert await running.metric("pdserve:ledger_leaked", kind=kind) == 0


async def test_ledger_asks_for_the_cluster_secret_and_not_for_the_api_key() -> None:
    async with gateway(cluster_secret="secret", api_key="key") as running:
        assert [await status_of(running, secret=secret) for secret in (None, "key", "secret")] == [401, 401, 200]


async def test_ledger_shows_a_request_that_waits_with_the_worker_that_has_it() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), silent) as worker:
        asking = asyncio.create_task(running.client().completions.create(model="smol", prompt="Hi", max_tokens=4))
        generate = await worker.generates.get()
        _, ledger = await running.get("/debug/ledger")
        (request,) = ledger["requests"]
        assert request["phase"] == "waiting" and 0 <= request["age_s"] < 20
        assert request["works"] == [
            {
                "work_id": request["request_id"],
                "worker_id": "d0",
                "dp_rank": 0,
                "attempt_id": generate.request_id,
            }
        ]
        assert ledger["leaks"] == []
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await until(lambda: running.get("/debug/ledger"), lambda answer: answer[1]["requests"] == [])


async def test_ledger_shows_a_stream_that_has_begun_as_answering() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), starting(["a", "b"])):
        stream = await running.client().completions.create(model="smol", prompt="Hi", max_tokens=8, stream=True)
        await anext(stream)
        _, ledger = await running.get("/debug/ledger")
        assert [request["phase"] for request in ledger["requests"]] == ["answering"]
        assert ledger["leaks"] == []
        await stream.close()
