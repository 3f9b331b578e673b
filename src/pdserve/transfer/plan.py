"""Which pages a chunk completes, and how many writes a handoff consists of. The one place that knows.

Both sides call it, so the receiver can count exactly (DESIGN section 4). A page goes over once: when a chunk completes
it, or, incomplete, with the last chunk.
"""

from pdserve.kv.layout import KvLayout
from pdserve.units import div_ceil, div_exact


def pages_completed(*, start: int, stop: int, is_last: bool, page_slots: int) -> range:
    """Positions in the sequence of the pages that a chunk of tokens `[start, stop)` completes."""
    return range(start // page_slots, div_ceil(stop, page_slots) if is_last else stop // page_slots)


def pages_to_write(*, num_held_tokens: int, num_prompt_tokens: int, page_slots: int) -> range:
    """Positions of all pages of a handoff: of tokens `[num_held_tokens, num_prompt_tokens - 1)`.

    The last prompt token is computed by the decode worker. Requires: `num_held_tokens` is a multiple of `page_slots`.
    """
    first = div_exact(num_held_tokens, page_slots)
    return range(first, div_ceil(num_prompt_tokens - 1, page_slots))


def num_writes(layout: KvLayout, *, num_held_tokens: int, num_prompt_tokens: int) -> int:
    """Writes of a whole handoff: each page in each layer, and the tail."""
    pages = pages_to_write(
        num_held_tokens=num_held_tokens, num_prompt_tokens=num_prompt_tokens, page_slots=layout.page_slots
    )
    return len(pages) * layout.num_layers + 1
