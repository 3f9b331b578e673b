"""What a grant must satisfy before anything is written for it: it comes from another process."""

from pdserve.fabric.port import IMMEDIATE_GENERATION_BITS, IMMEDIATE_SLOT_BITS
from pdserve.transfer.plan import pages_to_write
from pdserve.wire.peer import Grant


def contradiction(grant: Grant, *, page_slots: int, num_pages: int, num_tail_slots: int) -> str | None:
    """What a grant says against itself or the handshake (which gave `num_pages` and `num_tail_slots`), or None."""
    num_tokens, num_held = len(grant.token_ids), grant.num_held_tokens
    if not 0 <= num_held < num_tokens - 1:
        return f"{num_held} of {num_tokens} tokens are held: nothing to prefill"
    if num_held % page_slots:
        return f"{num_held} held tokens are no whole pages of {page_slots}"
    if not 0 <= grant.tail_slot < num_tail_slots:
        return f"tail slot {grant.tail_slot} is outside the tail region"
    if not 0 <= grant.immediate < 1 << IMMEDIATE_SLOT_BITS + IMMEDIATE_GENERATION_BITS:
        return f"immediate {grant.immediate} has no 32 bits"
    if min(grant.token_ids) < 0:
        return f"token {min(grant.token_ids)} is negative"
    wanted = pages_to_write(num_held_tokens=num_held, num_prompt_tokens=num_tokens, page_slots=page_slots)
    if len(grant.page_indices) != len(wanted):
        return f"{len(grant.page_indices)} pages do not fit {num_tokens} tokens"
    if not all(0 <= page_index < num_pages for page_index in grant.page_indices):
        return f"a page index is outside [0, {num_pages})"
    if len(set(grant.page_indices)) != len(grant.page_indices):
        return "a page is granted twice"
    return None
