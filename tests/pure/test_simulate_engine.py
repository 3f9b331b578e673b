"""The engine of hashes answers from its pages what the model answers without any, unless a page is wrong."""

from collections.abc import Generator
from itertools import count, product

import pytest

from pdserve.clock import VirtualClock
from pdserve.ids import SequenceId
from pdserve.schedule.batch import Batch, Chunk, PageCopy
from pdserve.simulate.engine import HashEngine
from pdserve.simulate.model import (
    DRAFT,
    GQA,
    MLA,
    HashModel,
    reference_answer,
    reference_draft_kv,
    reference_kv,
    reference_tail,
)

PROMPT = tuple(range(10, 20))
PAGES = (5, 2, 7)
NUM_PAGES = 8
RANKS = [(GQA, 1), (GQA, 2), (GQA, 4), (MLA, 2)]


@pytest.fixture(params=RANKS, ids=["gqa", "two ranks", "replicas", "mla"])
def engine(request: pytest.FixtureRequest) -> Generator[HashEngine]:
    layout, num_ranks = request.param
    model = HashModel(layout=layout, draft_layout=DRAFT)
    engine = HashEngine(model, num_ranks=num_ranks, num_pages=NUM_PAGES, num_tail_slots=1, clock=VirtualClock())
    yield engine
    engine.close()


def compute(engine: HashEngine, chunk: Chunk, *, copies: tuple[PageCopy, ...] = ()) -> tuple[int, ...]:
    """The tokens sampled after the chunk, when it samples."""
    engine.start(Batch(pass_index=0, chunks=(chunk,), copies=copies))
    while (result := engine.step()) is None:
        pass
    return result.sampled[0][1] if result.sampled else ()


def chunk_of(
    start: int, stop: int, *, drafts: tuple[int, ...] = (), tail_slot: int | None = None, sequence_id: int = 1
) -> Chunk:
    return Chunk(
        sequence_id=SequenceId(sequence_id),
        start=start,
        token_ids=PROMPT[start:stop] + drafts,
        page_indices=PAGES,
        samples=stop == len(PROMPT),
        num_drafts=len(drafts),
        tail_slot=tail_slot,
    )


def require_right(engine: HashEngine, pages: tuple[int, ...]) -> None:
    for kv in engine.ranks:
        for head in kv.heads:
            wanted = reference_kv(engine.model.layout, head, PROMPT)
            assert kv.read(pages, len(PROMPT), head=head) == wanted


@pytest.mark.parametrize("cut", range(1, len(PROMPT)))
def test_prompt_in_two_chunks_has_the_kv_and_the_answer_of_the_model(engine: HashEngine, cut: int) -> None:
    compute(engine, chunk_of(0, cut))
    sampled = compute(engine, chunk_of(cut, len(PROMPT)))
    require_right(engine, PAGES)
    assert sampled == reference_answer(engine.model.layout, PROMPT, 1)
    assert engine.drafter is not None
    wanted = reference_draft_kv(engine.model, PROMPT + sampled)
    assert engine.drafter.kv.read(PAGES, len(PROMPT), head=0) == wanted


@pytest.mark.parametrize("page_index", PAGES)
def test_wrong_byte_in_any_page_layer_head_and_plane_changes_the_answer(engine: HashEngine, page_index: int) -> None:
    compute(engine, chunk_of(0, len(PROMPT) - 1))
    sequence_ids = count(2)
    for kv in engine.ranks:
        layout = kv.layout
        runs = range(layout.num_kv_heads * layout.num_planes)
        for layer_index, run in product(range(layout.num_layers), runs):
            page = layout.page_offset(layer_index=layer_index, page_index=page_index, num_pages=NUM_PAGES)
            offset = page + run * layout.page_slots * layout.slot_bytes
            kv.region.buffer[offset] ^= 1
            sampled = compute(engine, chunk_of(len(PROMPT) - 1, len(PROMPT), sequence_id=next(sequence_ids)))
            assert sampled != reference_answer(engine.model.layout, PROMPT, 1)
            kv.region.buffer[offset] ^= 1


def test_right_guesses_are_kept_and_what_follows_the_first_wrong_one_is_not(engine: HashEngine) -> None:
    answer = reference_answer(engine.model.layout, PROMPT, 3)
    sampled = compute(engine, chunk_of(0, len(PROMPT), drafts=(answer[0], answer[1] + 1)))
    assert sampled == answer[:2]


def test_tail_holds_the_hidden_state_of_the_last_position(engine: HashEngine) -> None:
    compute(engine, chunk_of(0, len(PROMPT) - 1, tail_slot=0))
    wanted = reference_tail(engine.model.layout, PROMPT[:-1])
    assert engine.tail_region.buffer[: len(wanted)] == wanted


def test_copied_page_holds_what_its_source_holds_in_every_layer(engine: HashEngine) -> None:
    compute(engine, chunk_of(0, len(PROMPT) - 1))
    compute(engine, chunk_of(len(PROMPT) - 1, len(PROMPT)), copies=(PageCopy(source=5, target=0),))
    require_right(engine, (0, 2, 7))


def test_only_what_others_write_is_reported(engine: HashEngine) -> None:
    writes: list[tuple[int, int]] = []
    for kv in engine.ranks:
        kv.writes.on_write = lambda start, stop: writes.append((start, stop))
    compute(engine, chunk_of(0, len(PROMPT)))
    assert writes == []
    engine.ranks[0].region.buffer[8:16] = bytes(8)
    assert writes == [(8, 16)]
