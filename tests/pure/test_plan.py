"""Which pages a chunk completes, against a reference that walks over single tokens."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kv.layout import KvLayout
from pdserve.transfer.plan import num_writes, pages_completed, pages_to_write

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, page_slots=16, dtype="float32")


def pages_by_walking(*, start: int, stop: int, is_last: bool, page_slots: int) -> list[int]:
    """Pages whose last slot is filled by a token of the chunk, and the one left open by the last chunk."""
    completed: list[int] = []
    for position in range(start, stop):
        if (position + 1) % page_slots == 0 or (is_last and position == stop - 1):
            completed.append(position // page_slots)
    return completed


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """Page size, held tokens, prompt tokens, and where chunks meet: from token 0, or from the end of the held ones."""
    page_slots = draw(st.integers(1, 9))
    num_held = page_slots * draw(st.integers(0, 3))
    num_prompt = num_held + draw(st.integers(2, 40))
    first = draw(st.sampled_from([0, num_held]))
    inner = draw(st.sets(st.integers(first + 1, num_prompt - 2))) if num_prompt - 2 > first else set[int]()
    return page_slots, num_held, num_prompt, [first, *sorted(inner), num_prompt - 1]


@given(st.integers(1, 20), st.integers(0, 100), st.integers(1, 100), st.booleans())
def test_pages_completed_by_a_chunk_equal_a_walk_over_its_tokens(
    page_slots: int, start: int, num_tokens: int, is_last: bool
) -> None:
    stop = start + num_tokens
    completed = pages_completed(start=start, stop=stop, is_last=is_last, page_slots=page_slots)
    assert list(completed) == pages_by_walking(start=start, stop=stop, is_last=is_last, page_slots=page_slots)


@given(handoffs())
def test_pages_over_any_chunk_cuts_are_written_exactly_once(handoff: tuple[int, int, int, list[int]]) -> None:
    page_slots, num_held, num_prompt, cuts = handoff
    written = [
        position
        for start, stop in pairwise(cuts)
        for position in pages_completed(start=start, stop=stop, is_last=stop == num_prompt - 1, page_slots=page_slots)
        if position >= num_held // page_slots
    ]
    wanted = pages_to_write(num_held_tokens=num_held, num_prompt_tokens=num_prompt, page_slots=page_slots)
    assert written == list(wanted)
    assert written == sorted({token // page_slots for token in range(num_held, num_prompt - 1)})


@given(handoffs())
def test_num_writes_counts_each_page_in_each_layer_and_the_tail(handoff: tuple[int, int, int, list[int]]) -> None:
    page_slots, num_held, num_prompt, _ = handoff
    layout = KvLayout(num_layers=5, num_kv_heads=1, head_dim=1, page_slots=page_slots, dtype="float32")
    pages = {token // page_slots for token in range(num_held, num_prompt - 1)}
    writes = [(layer, page) for layer in range(layout.num_layers) for page in pages]
    assert num_writes(layout, num_held_tokens=num_held, num_prompt_tokens=num_prompt) == len(writes) + 1


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_pages"),
    # The last prompt token is not handed over, so a prompt of page + 1 tokens still fits one page.
    [(1, 0), (2, 1), (15, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)],
)
def test_pages_to_write_at_page_edges_leave_out_the_last_token(num_prompt_tokens: int, num_pages: int) -> None:
    pages = pages_to_write(num_held_tokens=0, num_prompt_tokens=num_prompt_tokens, page_slots=16)
    assert pages == range(num_pages)
    assert num_writes(LAYOUT, num_held_tokens=0, num_prompt_tokens=num_prompt_tokens) == 3 * num_pages + 1


def test_pages_completed_by_a_chunk_inside_a_page_are_none() -> None:
    assert not pages_completed(start=3, stop=15, is_last=False, page_slots=16)


def test_pages_completed_by_a_last_chunk_inside_a_page_is_that_page() -> None:
    assert pages_completed(start=17, stop=20, is_last=True, page_slots=16) == range(1, 2)


def test_pages_to_write_after_held_tokens_inside_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        pages_to_write(num_held_tokens=15, num_prompt_tokens=40, page_slots=16)
