"""Which guesses the decoding sequences of a batch try, and the pages that these and an engine's drafter need.

A guess costs as much as a token and is worth one only when it is right. So guesses get what is left over: of the tokens
up to `saturation_tokens`, which a pass takes almost for free, and of the pages beyond one for each other sequence that
generates, so that no one is preempted for a guess. When tokens are short, every sequence gets its first guess before
any gets its second: a guess is only worth something when all before it were right.
"""

from collections.abc import Sequence as Many

from pdserve.config.speculation import Speculation
from pdserve.ids import SequenceId
from pdserve.kv.pages import PagePool
from pdserve.schedule.chunk_plan import ChunkPlan
from pdserve.schedule.ngram import NgramIndex
from pdserve.schedule.sequence import Sequence


class Drafts:
    """Threads: one."""

    def __init__(self, *, speculation: Speculation, pool: PagePool, page_slots: int, saturation_tokens: int) -> None:
        self._speculation = speculation
        self._pool = pool
        self._page_slots = page_slots
        self._saturation_tokens = saturation_tokens
        self._ngrams: dict[SequenceId, NgramIndex] = {}

    def extend(self, decodes: Many[ChunkPlan], prefills: Many[ChunkPlan], *, num_reserved_pages: int) -> None:
        """Adds drafts to the decodes, and pages to look ahead in to all that sample. So many pages stay free."""
        plans = (*decodes, *prefills)
        room = self._saturation_tokens - sum(plan.num_tokens for plan in plans)
        if room > 0:
            self._add_drafts(decodes, room=room, num_reserved_pages=num_reserved_pages)
        if self._speculation.needs_engine:
            for plan in plans:
                if plan.samples:
                    self._look_ahead(plan, num_reserved_pages=num_reserved_pages)

    def forget(self, sequence_id: SequenceId) -> None:
        self._ngrams.pop(sequence_id, None)

    def _add_drafts(self, decodes: Many[ChunkPlan], *, room: int, num_reserved_pages: int) -> None:
        guesses = [(plan, self._guesses(plan.sequence)) for plan in decodes]
        for num_before in range(self._speculation.num_draft_tokens):
            for plan, token_ids in guesses:
                if room == 0:
                    return
                is_next = len(plan.draft_token_ids) == num_before < len(token_ids)
                if is_next and self._cover(plan.sequence, plan.stop + 1, num_reserved_pages=num_reserved_pages):
                    plan.draft_token_ids = token_ids[: num_before + 1]
                    room -= 1

    def _look_ahead(self, plan: ChunkPlan, *, num_reserved_pages: int) -> None:
        num_slots = min(self._speculation.num_draft_tokens, plan.sequence.longest_stop - plan.stop)
        self._cover(plan.sequence, plan.stop + num_slots, num_reserved_pages=num_reserved_pages)
        plan.num_lookahead_slots = num_slots

    def _guesses(self, sequence: Sequence) -> tuple[int, ...]:
        """No more than can become tokens: the pass gives one token more than it has drafts that are right."""
        num_wanted = sequence.longest_stop - len(sequence.token_ids)
        if num_wanted < 1:
            return ()
        if self._speculation.needs_engine:
            return sequence.draft_token_ids[:num_wanted]
        index = self._ngrams.get(sequence.sequence_id)
        if index is None:
            index = self._ngrams[sequence.sequence_id] = NgramIndex()
        return index.propose(sequence.token_ids, num_tokens=min(num_wanted, self._speculation.num_draft_tokens))

    def _cover(self, sequence: Sequence, num_slots: int, *, num_reserved_pages: int) -> bool:
        """Takes pages up to that slot; False when they are too few."""
        while len(sequence.page_indices) * self._page_slots < num_slots:
            if self._pool.num_free <= num_reserved_pages:
                return False
            sequence.page_indices += self._pool.allocate(1)
        return True
