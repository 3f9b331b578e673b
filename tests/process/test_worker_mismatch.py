"""Workers that can't exchange pages refuse each other, and their requests are served all the same."""

from pathlib import Path

import pytest
from tests.process.commands_under_test import START_TIMEOUT_S, cluster
from tests.process.gateway_under_test import until

from pdserve.config.role import Role
from pdserve.model.source import ModelSource

PAGE_SLOTS_DIFFER = "KV caches differ in layout.page_slots: ours is {!r}, the peer's is {!r}"
DRAFTERS_DIFFER = "KV caches differ in draft_layout: ours is 'no drafter"
SAME_DRAFTER = "start both workers with the same model and the same --speculate"


@pytest.mark.parametrize(
    ("decode_flags", "prefill_flags", "decode_says", "prefill_says"),
    [
        (
            "--page-slots 16",
            "--page-slots 32",
            PAGE_SLOTS_DIFFER.format("16", "32"),
            PAGE_SLOTS_DIFFER.format("32", "16"),
        ),
        ("", "--speculate draft:default", DRAFTERS_DIFFER, SAME_DRAFTER),
    ],
)
async def test_pair_with_other_layouts_refuses_and_the_decode_side_prefills(
    model: ModelSource,
    tmp_path: Path,
    text_ids: list[int],
    decode_flags: str,
    prefill_flags: str,
    decode_says: str,
    prefill_says: str,
) -> None:
    async with cluster(model, tmp_path) as workers:
        running = workers.running
        decode = await workers.start_worker("d0", Role.DECODE, *decode_flags.split())
        prefill = await workers.start_worker("p0", Role.PREFILL, *prefill_flags.split())
        await until(running.workers, lambda found: found.keys() == {"d0", "p0"}, timeout_s=START_TIMEOUT_S)
        answer = await running.complete(text_ids[:40], max_tokens=4)
        assert answer.num_tokens == 4
        assert await running.metric("pdserve:prefill_local_total", worker="d0", reason="no_prefill_worker") == 1
        await decode.until_says(decode_says)
        await prefill.until_says(prefill_says)
        assert (await running.workers())["d0"]["num_prefill_peers"] == 0
        await running.until_idle()
