"""A drafter in rank processes: whole on the first of three, its cache in a region that the main process maps."""

import sys
from pathlib import Path

import msgspec
import numpy as np
from tests.process.engine_under_test import write_nine_heads
from tests.pure.drafting_engine import NUM_PAGES, SEEDED, DraftingEngine, Generating, spec_of
from tests.pure.tiny_checkpoints import random_tokens
from tests.pure.tiny_heads import write_eagle

from pdserve.config.speculation import Drafter
from pdserve.engine.client import start_engine
from pdserve.schedule.batch import Batch
from pdserve.shared_region import host_buffer

NUM_LAYERS = 2
PROMPT = random_tokens(3, 29)
PAGES = (5, 9, 2, 7, 11, 0, 3, 21)


async def test_head_beside_three_ranks_guesses_and_caches_as_beside_one(tmp_path: Path) -> None:
    """And the region has room for the fabric's flush behind the last page, and the counter counts its layer."""
    model_dir, head_dir = tmp_path / "model", tmp_path / "head"
    write_nine_heads(model_dir, num_layers=NUM_LAYERS)
    write_eagle(head_dir, hidden_dim=144)
    spec = spec_of(model_dir, Drafter.EAGLE, head_dir)
    expected, answer = (Generating(prompt=PROMPT, page_indices=PAGES, sampling=SEEDED) for _ in range(2))
    alone = DraftingEngine(spec)
    guesses: list[tuple[int, ...]] = []
    engine = await start_engine(msgspec.structs.replace(spec, tensor_parallel_size=3))
    try:
        layout = engine.info.draft_layout
        assert layout == alone.info.draft_layout and layout is not None
        assert engine.info.num_counted_layers == NUM_LAYERS + 1
        assert engine.draft_kv_region is not None
        assert engine.draft_kv_region.num_bytes >= layout.region_bytes(NUM_PAGES) + 64
        for pass_index, stop in enumerate((10, None, None, None, None)):
            chunk = answer.chunk(stop)
            new_sequences = (answer.announcement(),) if pass_index == 1 else ()
            result = await engine.run(Batch(pass_index=pass_index, chunks=(chunk,), new_sequences=new_sequences))
            answer.take(chunk, result)
            expected.step(alone, stop=stop)
            guesses.append(answer.drafts)
            assert (answer.output, answer.drafts) == (expected.output, expected.drafts)
            ticks = int.from_bytes(engine.counter_region.buffer[:8], sys.byteorder)
            assert ticks == (pass_index + 1) * (NUM_LAYERS + 1 + 1)
        assert np.array_equal(
            np.frombuffer(host_buffer(engine.draft_kv_region)[: layout.region_bytes(NUM_PAGES)], np.uint8),
            alone.draft_kv.reshape(-1),
        )
    finally:
        await engine.close()
    assert [len(drafts) for drafts in guesses] == [0, 4, 4, 4, 4]
