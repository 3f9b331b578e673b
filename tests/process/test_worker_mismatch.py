"""Workers that can't exchange pages refuse each other, and their requests are served all the same."""

from pathlib import Path

import pytest
from tests.process.commands_under_test import START_TIMEOUT_S, cluster
from tests.process.gateway_under_test import until

from pdserve.config.role import Role
from pdserve.model.source import ModelSource


@pytest.mark.parametrize(("flag", "field", "ours", "theirs"), [("--page-slots", "layout.page_slots", "16", "32")])
async def test_pair_with_other_layouts_refuses_and_the_decode_side_prefills(
    model: ModelSource, tmp_path: Path, text_ids: list[int], flag: str, field: str, ours: str, theirs: str
) -> None:
    async with cluster(model, tmp_path) as workers:
        running = workers.running
        decode = await workers.start_worker("d0", Role.DECODE, flag, ours)
        prefill = await workers.start_worker("p0", Role.PREFILL, flag, theirs)
        await until(running.workers, lambda found: found.keys() == {"d0", "p0"}, timeout_s=START_TIMEOUT_S)
        answer = await running.complete(text_ids[:40], max_tokens=4)
        assert answer.num_tokens == 4
        assert await running.metric("pdserve:prefill_local_total", worker="d0", reason="no_prefill_worker") == 1
        said = f"KV caches differ in {field}: ours is {ours!r}, the peer's is {theirs!r}"
        await decode.until_says(said)
        await prefill.until_says(f"KV caches differ in {field}: ours is {theirs!r}, the peer's is {ours!r}")
        assert (await running.workers())["d0"]["num_prefill_peers"] == 0
        await running.until_idle()


async def test_worker_with_another_drafter_is_not_let_in(model: ModelSource, tmp_path: Path) -> None:
    """The drafter is part of the fingerprint, so the gateway is the first to see it."""
    async with cluster(model, tmp_path) as workers:
        await workers.start_worker("d0", Role.DECODE)
        await until(workers.running.workers, lambda found: found.keys() == {"d0"}, timeout_s=START_TIMEOUT_S)
        prefill = await workers.start_worker("p0", Role.PREFILL, "--speculate", f"draft:{model.dir}")
        assert await prefill.wait(timeout_s=START_TIMEOUT_S) == 2
        assert "fingerprint" in prefill.stderr
        assert (await workers.running.workers()).keys() == {"d0"}
