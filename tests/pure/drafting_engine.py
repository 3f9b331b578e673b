"""A whole engine of one rank in the test's own process, with a drafter, and sequences that run on it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve.config.speculation import Drafter, Speculation
from pdserve.engine.loading import load_rank
from pdserve.engine.port import EngineSpec
from pdserve.engine.rank_protocol import RankStart
from pdserve.engine.shape import info_of
from pdserve.ids import SequenceId
from pdserve.kv.layout import KvLayout
from pdserve.model.config import read_config
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch, BatchResult, Chunk, NewSequence, PageCopy
from pdserve.shared_region import MemoryRegion, host_buffer

NUM_PAGES = 32
PAGE_SLOTS = 8
NUM_TAIL_SLOTS = 4

FIRST_SEQUENCE = SequenceId(1)

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
SEEDED = SamplingParams(max_tokens=100, temperature=1.2, top_p=0.9, seed=7)


def spec_of(
    model_dir: Path, drafter: Drafter | None = None, draft_dir: Path | None = None, *, num_draft_tokens: int = 4
) -> EngineSpec:
    speculation = None
    if drafter is not None:
        speculation = Speculation(
            drafter=drafter,
            model_dir=None if draft_dir is None else str(draft_dir),
            num_draft_tokens=num_draft_tokens,
        )
    return EngineSpec(
        model_dir=str(model_dir),
        num_pages=NUM_PAGES,
        page_slots=PAGE_SLOTS,
        num_tail_slots=NUM_TAIL_SLOTS,
        num_threads=1,
        speculation=speculation,
    )


class DraftingEngine:
    """Rank 0, and the only one."""

    def __init__(self, spec: EngineSpec) -> None:
        self.info = info_of(spec)
        start = RankStart(spec=spec, rank=0, cpus=(), rendezvous_fd=None)
        loaded = load_rank(read_config(Path(spec.model_dir)), self.info.sharding.rank_layout, start)
        assert loaded.regions.lead is not None
        self.regions, self._lead_regions, self._runner = loaded.regions, loaded.regions.lead, loaded.runner
        self._num_passes = 0

    def run(
        self,
        *chunks: Chunk,
        new_sequences: Sequence[NewSequence] = (),
        copies: Sequence[PageCopy] = (),
        ended_sequences: Sequence[SequenceId] = (),
    ) -> BatchResult:
        batch = Batch(
            pass_index=self._num_passes,
            chunks=chunks,
            copies=tuple(copies),
            new_sequences=tuple(new_sequences),
            ended_sequences=tuple(ended_sequences),
        )
        self._num_passes += 1
        return self._runner.run(batch)

    @property
    def num_ticks(self) -> int:
        return int.from_bytes(self._lead_regions.counter.buffer[:8], sys.byteorder)

    @property
    def kv(self) -> NDArray[np.uint8]:
        """Bytes `[layer][page][...]`, not copied."""
        return _pages(self.regions.kv, self.info.sharding.rank_layout)

    @property
    def draft_kv(self) -> NDArray[np.uint8]:
        assert self._lead_regions.draft_kv is not None and self.info.draft_layout is not None
        return _pages(self._lead_regions.draft_kv, self.info.draft_layout)

    def draft_vectors(self, page_indices: Sequence[int], num_slots: int) -> NDArray[np.float32]:
        """What is cached in the first slots of a sequence: `[layer][head and plane][slot][dim]`."""
        layout = self.info.draft_layout
        assert layout is not None
        num_vectors = layout.num_kv_heads * layout.num_planes
        values = self.draft_kv[:, list(page_indices)].view(np.float32)
        paged = values.reshape(layout.num_layers, len(page_indices), num_vectors, PAGE_SLOTS, layout.head_dim)
        by_slot = paged.swapaxes(1, 2).reshape(layout.num_layers, num_vectors, -1, layout.head_dim)
        return by_slot[:, :, :num_slots]

    @property
    def tails(self) -> NDArray[np.uint8]:
        """Bytes `[slot][...]`, not copied."""
        tails = np.frombuffer(self._lead_regions.tail.buffer, np.uint8)
        return tails[: NUM_TAIL_SLOTS * self.info.tail_slot_bytes].reshape(NUM_TAIL_SLOTS, -1)


def _pages(region: MemoryRegion, layout: KvLayout) -> NDArray[np.uint8]:
    values = np.frombuffer(host_buffer(region), np.uint8)[: layout.region_bytes(NUM_PAGES)]
    return values.reshape(layout.num_layers, NUM_PAGES, layout.page_bytes)


@dataclass(slots=True, kw_only=True)
class Generating:
    """What a scheduler keeps of a sequence that generates."""

    sequence_id: SequenceId = FIRST_SEQUENCE
    prompt: Sequence[int]
    page_indices: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    num_computed: int = 0
    carry_slot: int | None = None
    output: list[int] = field(default_factory=list[int])
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0

    def announcement(self) -> NewSequence:
        return NewSequence(
            sequence_id=self.sequence_id,
            prompt_token_ids=tuple(self.prompt),
            output_token_ids=tuple(self.output),
            sampling=self.sampling,
        )

    def chunk(self, stop: int | None = None, *, tail_slot: int | None = None) -> Chunk:
        """Up to `stop`, a token of the prompt; or all that is known, and the drafts, as far as there are pages."""
        known = [*self.prompt, *self.output]
        is_last = stop is None
        stop = len(known) if stop is None else stop
        drafts = self.drafts[: len(self.page_indices) * PAGE_SLOTS - stop] if is_last else ()
        return Chunk(
            sequence_id=self.sequence_id,
            start=self.num_computed,
            token_ids=(*known[self.num_computed : stop], *drafts),
            page_indices=self.page_indices,
            samples=is_last,
            num_drafts=len(drafts),
            tail_slot=tail_slot,
            carry_slot=self.carry_slot,
        )

    def take(self, chunk: Chunk, result: BatchResult) -> None:
        sampled, drafts = dict(result.sampled).get(self.sequence_id, ()), dict(result.drafts)
        num_accepted = max(0, len(sampled) - 1)
        self.num_computed = chunk.stop - chunk.num_drafts + num_accepted
        self.num_drafts += chunk.num_drafts
        self.num_accepted += num_accepted
        self.output += sampled
        self.drafts = drafts.get(self.sequence_id, ())
        self.carry_slot = None

    def step(self, engine: DraftingEngine, *, stop: int | None = None) -> BatchResult:
        """One pass alone, announced with the first."""
        chunk = self.chunk(stop)
        new_sequences = [self.announcement()] if not self.output and chunk.samples else []
        result = engine.run(chunk, new_sequences=new_sequences)
        self.take(chunk, result)
        return result

    def generate(self, engine: DraftingEngine, num_tokens: int, *, cuts: Sequence[int] = ()) -> list[int]:
        """The next tokens: as many, or some more that were guessed. The prompt in chunks that end at the cuts."""
        for cut in cuts:
            self.step(engine, stop=cut)
        while len(self.output) < num_tokens:
            self.step(engine)
        return self.output[:num_tokens]


def hand_over(
    source: DraftingEngine,
    target: DraftingEngine,
    *,
    pages: Sequence[tuple[int, int]],
    tail_slots: tuple[int, int],
) -> None:
    """What a handoff moves: the pages of model and drafter, and the tail; each from one place to another."""
    for source_page, target_page in pages:
        target.kv[:, target_page] = source.kv[:, source_page]
        target.draft_kv[:, target_page] = source.draft_kv[:, source_page]
    target.tails[tail_slots[1]] = source.tails[tail_slots[0]]
