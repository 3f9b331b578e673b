"""The engine of hashes answers from its pages what the model answers without any, unless a page is wrong."""

from collections.abc import Generator

import pytest

from pdserve.clock import VirtualClock
from pdserve.ids import SequenceId
from pdserve.schedule.batch import Batch, Chunk, PageCopy
from pdserve.simulate.engine import HashEngine
from pdserve.simulate.model import LAYOUT, reference_answer, reference_kv

PROMPT = tuple(range(10, 20))
PAGES = (5, 2, 7)


@pytest.fixture
def engine() -> Generator[HashEngine]:
    engine = HashEngine(num_pages=8, num_tail_slots=1, clock=VirtualClock())
    yield engine
    engine.close()


def compute(engine: HashEngine, *, start: int, stop: int, copies: tuple[PageCopy, ...] = ()) -> int | None:
    """The token sampled after the chunk, when it reaches the end of the prompt."""
    chunk = Chunk(
        sequence_id=SequenceId(1),
        start=start,
        token_ids=PROMPT[start:stop],
        page_indices=PAGES,
        samples=stop == len(PROMPT),
    )
    engine.start(Batch(pass_index=0, chunks=(chunk,), copies=copies))
    while (result := engine.step()) is None:
        pass
    return result.sampled[0][1][0] if result.sampled else None


@pytest.mark.parametrize("cut", range(1, len(PROMPT)))
def test_prompt_in_two_chunks_has_the_kv_and_the_answer_of_the_model(engine: HashEngine, cut: int) -> None:
    compute(engine, start=0, stop=cut)
    token_id = compute(engine, start=cut, stop=len(PROMPT))
    assert engine.read(PAGES, len(PROMPT)) == reference_kv(PROMPT)
    assert (token_id,) == reference_answer(PROMPT, 1)


@pytest.mark.parametrize("layer_index", range(LAYOUT.num_layers))
@pytest.mark.parametrize("page_index", PAGES)
def test_wrong_byte_in_any_page_and_layer_changes_the_answer(
    engine: HashEngine, page_index: int, layer_index: int
) -> None:
    compute(engine, start=0, stop=len(PROMPT) - 1)
    engine.kv_region.buffer[LAYOUT.page_offset(layer_index=layer_index, page_index=page_index, num_pages=8)] ^= 1
    assert (compute(engine, start=len(PROMPT) - 1, stop=len(PROMPT)),) != reference_answer(PROMPT, 1)


def test_copied_page_holds_what_its_source_holds_in_every_layer(engine: HashEngine) -> None:
    compute(engine, start=0, stop=len(PROMPT) - 1)
    compute(engine, start=len(PROMPT) - 1, stop=len(PROMPT), copies=(PageCopy(source=5, target=0),))
    assert engine.read((0, 2, 7), len(PROMPT)) == reference_kv(PROMPT)


def test_only_what_others_write_is_reported(engine: HashEngine) -> None:
    writes: list[tuple[int, int]] = []
    engine.kv_writes.on_write = lambda start, stop: writes.append((start, stop))
    compute(engine, start=0, stop=len(PROMPT))
    assert writes == []
    engine.kv_region.buffer[8:16] = bytes(8)
    assert writes == [(8, 16)]
