"""Workers joining a gateway, and what the gateway shows of them."""

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import pytest
from tests.process.gateway_under_test import gateway, until
from tests.process.scripted_worker import DEFAULT_LOAD, join_message, joined, shake_hands

from pdserve.clock import VirtualClock
from pdserve.config.role import Role
from pdserve.errors import AuthenticationError, PeerLost
from pdserve.gateway import hub
from pdserve.ids import Incarnation, WorkerId
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import JoinRefused, Leave, Load, PrefillTarget, WorkerHeartbeat
from pdserve.wire.peer import PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("changed", "values"),
    [
        ({"model_name": "other"}, ["'smol'", "'other'"]),
        ({"model_fingerprint": "f2"}, ["'f1'", "'f2'"]),
        ({"lease_s": 1e6}, ["60", "1e+06"]),
        ({"loads": ()}, ["1024", "says 0"]),
        ({"loads": (DEFAULT_LOAD,) * 2, "role": Role.PREFILL}, ["has 1 ", "says 2"]),
    ],
)
async def test_join_that_does_not_fit_is_refused_with_both_values(changed: dict[str, Any], values: list[str]) -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        channel, answer = await shake_hands(running.session, running.url, join_message("d1", **changed))
        assert isinstance(answer, JoinRefused)
        assert all(value in answer.message for value in values)
        with pytest.raises(PeerLost):
            await asyncio.wait_for(channel.receive(), 5)
        await channel.close()


async def test_join_with_a_wrong_secret_is_refused() -> None:
    async with gateway(cluster_secret="right") as running:
        for secret in (None, "wrong"):
            with pytest.raises(AuthenticationError):
                await shake_hands(running.session, running.url, join_message("d0"), secret=secret)
        assert await running.metric("pdserve:authentications_refused_total", credential="cluster_secret") == 2
        async with joined(running.url, join_message("d0"), secret="right"):
            assert (await running.get("/ready"))[0] == 200


async def test_worker_that_does_not_begin_with_join_is_disconnected() -> None:
    async with gateway() as running, aiohttp.ClientSession() as session:
        with pytest.raises(PeerLost):
            heartbeat: Any = WorkerHeartbeat(sender=Incarnation(1), loads=(Load(),))
            await shake_hands(session, running.url, heartbeat)
        assert (await running.get("/workers"))[1]["workers"] == []
        assert await running.metric("pdserve:protocol_errors_total") == 1


async def test_worker_that_connects_and_says_nothing_is_disconnected_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with gateway() as running, running.session.ws_connect(f"{running.url}/cluster") as connection:
        assert (await connection.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
        assert (await running.get("/workers"))[1]["workers"] == []


async def test_superseded_worker_is_disconnected_and_can_not_come_back_while_the_other_is_there() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0", incarnation=1)) as old,
        joined(running.url, join_message("d0", incarnation=2)),
    ):
        await asyncio.wait_for(old.disconnected.wait(), 5)
        channel, answer = await shake_hands(running.session, running.url, join_message("d0", incarnation=1))
        assert isinstance(answer, JoinRefused) and "'d0'" in answer.message
        await channel.close()
        _, status = await running.get("/workers")
        assert [worker["incarnation"] for worker in status["workers"]] == ["2"]


async def test_leases_are_not_judged_right_after_the_gateway_itself_stood_still() -> None:
    clock = VirtualClock()
    async with gateway(clock=clock) as running, joined(running.url, join_message("d0", lease_s=2.0)) as worker:

        async def worker_ids() -> list[str]:
            return [shown["worker_id"] for shown in (await running.get("/workers"))[1]["workers"]]

        async def tick_after(duration_ns: int) -> None:
            """In each tick the gateway sends its heartbeat when that is due, as it is after half a second here."""
            clock.advance_ns(duration_ns)
            await asyncio.wait_for(worker.gateway_heartbeats.get(), 5)

        worker.beats = False
        await tick_after(10 * NS_PER_S)
        assert await worker_ids() == ["d0"]
        worker.heartbeat(Load(num_running=5))
        await until(lambda: running.metric("vllm:num_requests_running", worker="d0"), lambda value: value == 5)
        for _ in range(2):
            await tick_after(9 * NS_PER_S // 10)
            assert await worker_ids() == ["d0"]
        clock.advance_ns(9 * NS_PER_S // 10)
        await until(worker_ids, lambda shown: shown == [])


async def test_worker_that_says_goodbye_is_gone_at_once() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")) as worker:
        worker.channel.send(Leave(sender=worker.incarnation))
        await asyncio.wait_for(worker.disconnected.wait(), 5)
        assert (await running.get("/workers"))[1]["workers"] == []


async def test_decode_workers_hear_who_prefills_at_each_change() -> None:
    target = PrefillTarget(worker_id=WorkerId("p0"), incarnation=Incarnation(5), url="http://worker-p0:8101")
    async with gateway() as running, joined(running.url, join_message("d0")) as early:
        assert (await asyncio.wait_for(early.pools.get(), 5)).members == ()
        async with joined(running.url, join_message("p0", role=Role.PREFILL, incarnation=5)) as prefill:
            assert (await asyncio.wait_for(early.pools.get(), 5)).members == (target,)
            async with joined(running.url, join_message("d1")) as late:
                assert (await asyncio.wait_for(late.pools.get(), 5)).members == (target,)
            assert prefill.pools.empty()
        async with asyncio.timeout(5):
            while (await early.pools.get()).members != ():
                pass


async def test_request_names_its_prefill_worker_and_one_token_names_none() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0")) as decode,
        joined(running.url, join_message("p0", role=Role.PREFILL)),
    ):
        for prompt in ("long", "x"):
            await running.client().completions.create(model="smol", prompt=prompt)
        first, second = decode.generates.get_nowait(), decode.generates.get_nowait()
        assert first.prefill is not None and first.prefill.worker_id == "p0"
        assert second.prefill is None


async def test_burst_spreads_over_workers_between_two_heartbeats() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0", lease_s=60.0)) as first,
        joined(running.url, join_message("d1", lease_s=60.0)) as second,
    ):
        client = running.client()
        await asyncio.gather(*(client.completions.create(model="smol", prompt="x") for _ in range(10)))
        assert (first.generates.qsize(), second.generates.qsize()) == (5, 5)


async def test_burst_spreads_over_the_ranks_of_unequal_workers() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0", lease_s=60.0, loads=(DEFAULT_LOAD,) * 3)) as larger,
        joined(running.url, join_message("d1", lease_s=60.0)) as smaller,
    ):
        client = running.client()
        await asyncio.gather(*(client.completions.create(model="smol", prompt="x") for _ in range(12)))
        asked = [("d0", larger.generates.get_nowait().dp_rank) for _ in range(larger.generates.qsize())]
        asked += [("d1", smaller.generates.get_nowait().dp_rank) for _ in range(smaller.generates.qsize())]
        assert Counter(asked) == {("d0", 0): 3, ("d0", 1): 3, ("d0", 2): 3, ("d1", 0): 3}


async def test_request_goes_to_the_rank_that_its_worker_reports_as_emptiest() -> None:
    busy = Load(num_running=4, num_free_pages=90, num_pages=100)
    async with (
        gateway() as running,
        joined(running.url, join_message("d0", lease_s=60.0, loads=(busy, busy, DEFAULT_LOAD))) as first,
        joined(running.url, join_message("d1", lease_s=60.0, loads=(busy,))),
    ):
        await running.client().completions.create(model="smol", prompt="x")
        assert first.generates.get_nowait().dp_rank == 2


async def test_health_and_ready_need_a_decode_worker_and_live_does_not() -> None:
    async with gateway() as running, joined(running.url, join_message("p0", role=Role.PREFILL)):
        for path in ("/health", "/ready"):
            assert (await running.get(path))[0] == 503
        assert (await running.get("/live"))[0] == 200
        async with joined(running.url, join_message("b0", role=Role.BOTH)):
            for path in ("/health", "/ready", "/live"):
                assert (await running.get(path))[0] == 200


async def test_workers_and_metrics_show_the_last_heartbeat() -> None:
    load = Load(num_running=2, num_waiting=1, num_free_pages=25, num_pages=100, num_quarantined_pages=3)
    idle = Load(num_free_pages=50, num_pages=50)
    async with gateway() as running, joined(running.url, join_message("d0", loads=(idle, idle))) as worker:
        worker.heartbeat(idle, load, num_prefill_peers=4)
        rank = {"worker": "d0", "dp_rank": "1"}
        await until(lambda: running.metric("vllm:num_requests_running", **rank), lambda value: value == 2)
        assert await running.metric("vllm:num_requests_waiting", **rank) == 1
        assert await running.metric("vllm:kv_cache_usage_perc", **rank) == 0.75
        assert await running.metric("pdserve:quarantined_pages", **rank) == 3
        assert await running.metric("pdserve:quarantined_pages", worker="d0", dp_rank="0") == 0
        assert await running.metric("pdserve:workers", role="decode") == 1
        _, status = await running.get("/workers")
        assert status["model_fingerprint"] == "f1"
        (shown,) = status["workers"]
        assert (shown["worker_id"], shown["role"], shown["num_prefill_peers"]) == ("d0", "decode", 4)
        assert [(rank["dp_rank"], rank["num_running"], rank["num_pages"]) for rank in shown["ranks"]] == [
            (0, 0, 50),
            (1, 2, 100),
        ]
        assert shown["url"] == "http://worker-d0:8101"
        assert 0 < shown["lease_left_s"] <= 2.0
    async with gateway() as running:
        assert await running.metric("vllm:num_requests_running", worker="d0") == 0


async def test_metrics_count_a_streamed_answer() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        stream = await running.client().completions.create(model="smol", prompt="four", stream=True)
        async for _ in stream:
            pass
        await running.until_idle()
        expected = {
            "vllm:time_to_first_token_seconds_count": 1,
            "vllm:e2e_request_latency_seconds_count": 1,
            "vllm:inter_token_latency_seconds_count": 1,
            "vllm:time_per_output_token_seconds_count": 1,
            "vllm:request_time_per_output_token_seconds_count": 1,
            "pdserve:tokenize_seconds_count": 1,
            "pdserve:dispatch_seconds_count": 1,
            "vllm:request_prompt_tokens_count": 1,
            "vllm:request_prompt_tokens_sum": 4,
            "vllm:request_generation_tokens_count": 1,
            "vllm:request_generation_tokens_sum": 2,
            "vllm:prompt_tokens_total": 4,
            "vllm:generation_tokens_total": 2,
            "vllm:request_success_total": 1,
        }
        await until(lambda: running.metric("vllm:request_success_total"), lambda count: count == 1)
        assert {name: await running.metric(name) for name in expected} == expected
        assert await running.metric("pdserve:prefills_total", place="remote") == 1


async def test_version_names_the_protocol() -> None:
    async with gateway() as running:
        status, answer = await running.get("/version")
        assert status == 200 and answer["protocol_version"] == PROTOCOL_VERSION and answer["version"]
