"""Which tokens of which sequences go into the next forward pass, and which pages hold their KV.

A batch is filled in this order:

1. One token for each sequence that decodes: it generates, and all its tokens but the last have their KV. A sequence
   whose KV was handed over begins here, without queueing.
2. Chunks of prompts in the order of `prefill_queue`. The first may fill the batch up to `max_batch_tokens`; the next
   ones only fill it up to `saturation_tokens`. Up to there a pass takes hardly longer for more tokens, so short prompts
   share one; beyond, its time is linear in its tokens, and a chunk of a long prompt would only delay the end of the
   short ones in the same pass.
3. Guesses of what the decoding sequences come to next, as `drafts` says, out of what is left up to `saturation_tokens`.

Pages. A prompt gets all its pages when its first chunk is scheduled, so it never waits half computed for pages that
another half computed one holds. A decode takes a page when its next token needs one. When none is free, the youngest
generating sequence is preempted: it gives back its pages and computes them again later. One that still waits for a
running slot goes first, however old: else it could wait for the slot of a sequence that waits for its pages. Pages that
others share with it do not become free, so the next youngest follows until one does. A sequence that is itself the
youngest waits instead, with its pages. A forked sequence shares the full pages of its prompt, and gets a copy of the
last one, which it writes to.

Why this ends: the oldest running sequence that generates gets any page it needs from another one, or is the only one,
and then has all pages that are not held by prefill-only sequences or outside the scheduler, which come back by
themselves; no sequence is accepted that the whole pool could not hold. Preempted sequences come back only into pages
that are free without preempting, so between two rounds of preemptions there is a token that is never lost.
"""

from collections.abc import Sequence as Many

from pdserve.config.speculation import Speculation
from pdserve.errors import CapacityError, ContextOverflow, InternalError
from pdserve.ids import PageIndex, SequenceId
from pdserve.kv.pages import PagePool
from pdserve.schedule.announcements import Announcements
from pdserve.schedule.batch import Batch, BatchResult, Chunk, PageCopy
from pdserve.schedule.chunk_plan import ChunkPlan
from pdserve.schedule.copies import Copies, CopyPhase
from pdserve.schedule.drafts import Drafts
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.matching import require_matching
from pdserve.schedule.outcome import PromptLogprobs, StepOutcome
from pdserve.schedule.place import Place, Placed
from pdserve.schedule.prefill_queue import PrefillQueue
from pdserve.schedule.sequence import Sequence
from pdserve.units import div_ceil

RETRY_AFTER_S = 1.0
"""A full queue moves with each pass, in well under a second; sooner, the same client would mostly be refused again."""


class Scheduler:
    """Continuous batching over one page pool; at most one batch runs at a time.

    Each sequence is in exactly one of these, and `_queue` orders those in the first two that have a prompt to compute:

        _waiting       no pages, no running slot
        _running       pages and one of `max_running` slots
        _handed_over   pages with all KV but the last token's; waits for a slot

    Requires: the caller removes a generating sequence at the latest when it has `max_tokens` tokens.
    Threads: one.
    """

    def __init__(
        self, *, pool: PagePool, page_slots: int, limits: ScheduleLimits, speculation: Speculation | None = None
    ) -> None:
        self._pool = pool
        self._page_slots = page_slots
        self._limits = limits
        self._queue = PrefillQueue(ageing_tokens_per_s=limits.ageing_tokens_per_s)
        self._waiting: dict[SequenceId, Sequence] = {}
        self._running: dict[SequenceId, Sequence] = {}
        self._handed_over: dict[SequenceId, Sequence] = {}
        self._batch: Batch | None = None
        self._num_passes = 0
        self._removing: set[SequenceId] = set()
        self._announcements = Announcements()
        self._copies = Copies(pool=pool)
        self._drafts: Drafts | None = None
        if speculation is not None:
            self._drafts = Drafts(
                speculation=speculation, pool=pool, page_slots=page_slots, saturation_tokens=limits.saturation_tokens
            )
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._handed_over)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens still to be computed, of waiting and running sequences."""
        return self._queue.num_tokens

    @property
    def placed(self) -> tuple[Placed, ...]:
        """Every sequence that it has, once."""
        running = (
            Placed(Place.REMOVING if sequence_id in self._removing else Place.RUNNING, sequence)
            for sequence_id, sequence in self._running.items()
        )
        handed_over = (Placed(Place.HANDED_OVER, sequence) for sequence in self._handed_over.values())
        waiting = (
            Placed(Place.WAITING if sequence.scheduled_ns is None else Place.PREEMPTED, sequence)
            for sequence in self._waiting.values()
        )
        return (*running, *handed_over, *waiting)

    @property
    def copies(self) -> tuple[tuple[CopyPhase, PageCopy], ...]:
        """Each owns its source until it is done."""
        return self._copies.held

    def require_fits(self, sequence: Sequence) -> None:
        """Raises: `ContextOverflow` when the whole pool could not hold the sequence at its longest.

        `add` asks the same; ask before a handoff, so that no prompt is computed in vain.
        """
        num_pages = div_ceil(sequence.longest_stop, self._page_slots)
        if num_pages > self._pool.num_pages:
            raise ContextOverflow(
                f"prompt and output may need {num_pages} pages of {self._page_slots} tokens, the KV cache has "
                f"{self._pool.num_pages}: shorten the prompt or lower max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Take over a sequence: without pages, or handed over with the pages of all its tokens but the last, computed.

        Raises: `ContextOverflow` when the pool could never hold it; `CapacityError` when too many wait (a sequence
        handed over is never refused: its pages bound them); `InternalError` when it can't be run. Nothing changed then.
        """
        self._require_runnable(sequence)
        if sequence.page_indices:
            self._handed_over[sequence.sequence_id] = sequence
            return
        if len(self._waiting) >= self._limits.max_waiting:
            raise CapacityError(f"{len(self._waiting)} sequences wait to be scheduled", retry_after_s=RETRY_AFTER_S)
        self._waiting[sequence.sequence_id] = sequence
        self._queue.add(sequence)

    def fork(self, child: Sequence, *, page_indices: Many[PageIndex]) -> None:
        """Take over a sequence with all tokens but the last computed in these pages, which stay their owners'.

        It is then like one handed over: it shares the pages that its tokens fill, and owns a copy of the last one. When
        no page is free for that, it computes its tokens itself; it is never refused for the length of the queue.
        Requires: the first pages hold tokens `[0, child.num_computed)`, which those of a forked sequence do not before
        its first pass; `child` has no pages.
        Raises: `ContextOverflow` as `add`; `InternalError` when it can't be run. Nothing changed then.
        """
        self._require_new(child)
        num_full, num_partial_slots = divmod(child.num_computed, self._page_slots)
        num_pages = div_ceil(child.num_computed, self._page_slots)
        if child.page_indices or not child.decodes or num_pages > len(page_indices):
            raise InternalError(
                f"sequence {child.sequence_id} can't fork with {child.num_computed} of {len(child.token_ids)} tokens "
                f"computed, in {len(page_indices)} pages: bring all but the last token, and no pages of its own"
            )
        self.require_fits(child)
        needs_copy = num_partial_slots > 0
        if child.num_computed == 0 or (needs_copy and self._pool.num_free == 0):
            child.num_computed = 0
            child.carry_slot = None
            self._waiting[child.sequence_id] = child
            self._queue.add(child)
            return
        self._pool.share(page_indices[:num_full])
        child.page_indices += page_indices[:num_full]
        if needs_copy:
            child.page_indices += self._pool.allocate(1)
            self._copies.add(child.sequence_id, source=page_indices[num_full], target=child.page_indices[num_full])
        self._handed_over[child.sequence_id] = child

    def remove(self, sequence_id: SequenceId) -> Sequence | None:
        """The sequence, whose pages the caller now owns; None when it is in the running batch: `complete` returns it.

        Raises: `InternalError` when it is not in the scheduler.
        """
        self._place_of(sequence_id)
        if self._batch is not None and any(chunk.sequence_id == sequence_id for chunk in self._batch.chunks):
            self._removing.add(sequence_id)
            return None
        return self._take_out(sequence_id)

    def next_batch(self, now_ns: int) -> Batch | None:
        """The batch to run now; None when there is nothing to compute, or nothing before pages come back.

        Requires: the batch before it is completed.
        """
        if self._batch is not None:
            raise InternalError(f"pass {self._batch.pass_index} has not been completed")
        self._give_slots_to_handed_over()
        decodes = self._plan_decodes()
        prefills = self._plan_prefills(num_batch_tokens=len(decodes))
        plans = decodes + prefills
        if not plans:
            return None
        if self._drafts is not None:
            self._drafts.extend(decodes, prefills, num_reserved_pages=self._num_generating - 1)
        for plan in plans:
            if plan.sequence.scheduled_ns is None:
                plan.sequence.scheduled_ns = now_ns
        self._batch = Batch(
            pass_index=self._num_passes,
            chunks=tuple([plan.chunk(page_slots=self._page_slots) for plan in plans]),
            copies=self._copies.start(plan.sequence.sequence_id for plan in plans),
            ended_sequences=self._announcements.take_ended(),
            new_sequences=self._announcements.announce(plans),
        )
        self._num_passes += 1
        return self._batch

    def complete(self, result: BatchResult) -> StepOutcome:
        """Apply what the running batch computed.

        Raises: `InternalError` when the result is not that batch's; nothing changed then.
        """
        batch = require_matching(self._batch, result)
        self._batch = None
        self._copies.finish()
        outcome = StepOutcome()
        tokens, logprobs, prompt_logprobs = dict(result.sampled), dict(result.logprobs), dict(result.prompt_logprobs)
        drafts = dict(result.drafts)
        for chunk in batch.chunks:
            sequence_id = chunk.sequence_id
            sequence = self._running[sequence_id]
            sequence.num_computed = chunk.stop - chunk.num_drafts
            sequence.carry_slot = None
            if sequence_id in self._removing:
                outcome.removed.append(self._take_out(sequence_id))
                continue
            if sequence_id in prompt_logprobs:
                entries = prompt_logprobs[sequence_id]
                outcome.prompt_logprobs.append(
                    PromptLogprobs(sequence=sequence, start=chunk.start + 1, entries=entries)
                )
            if chunk.samples:
                self._extend(sequence, tokens[sequence_id], chunk=chunk, outcome=outcome)
                sequence.draft_token_ids = drafts.get(sequence_id, ())
                if sequence_id in logprobs:
                    outcome.logprobs[sequence_id] = logprobs[sequence_id]
            elif sequence.num_uncomputed == 0:
                outcome.prefilled.append(self._take_out(sequence_id))
            elif sequence.decodes:
                self._queue.discard(sequence_id)
            else:
                self._queue.reorder(sequence)
        return outcome

    def _extend(self, sequence: Sequence, token_ids: tuple[int, ...], *, chunk: Chunk, outcome: StepOutcome) -> None:
        num_accepted = len(token_ids) - 1
        sequence.num_computed += num_accepted
        sequence.token_ids += token_ids
        outcome.sampled.append((sequence, token_ids))
        outcome.num_drafts += chunk.num_drafts
        outcome.num_drafts_accepted += num_accepted
        self._queue.discard(sequence.sequence_id)

    @property
    def _num_generating(self) -> int:
        """Running ones, each of which needs a page before it has decoded `page_slots` tokens."""
        return sum(sequence.generates for sequence in self._running.values())

    def _require_new(self, sequence: Sequence) -> None:
        if self._holds(sequence.sequence_id):
            raise InternalError(f"sequence {sequence.sequence_id} is in the scheduler already")

    def _require_runnable(self, sequence: Sequence) -> None:
        self._require_new(sequence)
        subject = f"sequence {sequence.sequence_id}"
        if sequence.num_uncomputed < 1:
            raise InternalError(f"{subject} has nothing to compute")
        num_covered = len(sequence.page_indices) * self._page_slots
        is_fresh = not sequence.page_indices and sequence.num_computed == 0
        is_handed_over = sequence.decodes and sequence.num_computed <= num_covered
        if not is_fresh and not is_handed_over:
            raise InternalError(
                f"{subject} brings {len(sequence.page_indices)} pages with {sequence.num_computed} of "
                f"{len(sequence.token_ids)} tokens computed: bring none, or all but the last token"
            )
        self.require_fits(sequence)

    def _holds(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._running or sequence_id in self._waiting or sequence_id in self._handed_over

    def _place_of(self, sequence_id: SequenceId) -> dict[SequenceId, Sequence]:
        for place in (self._running, self._waiting, self._handed_over):
            if sequence_id in place:
                return place
        raise InternalError(f"sequence {sequence_id} is not in the scheduler")

    def _take_out(self, sequence_id: SequenceId) -> Sequence:
        sequence = self._place_of(sequence_id).pop(sequence_id)
        self._queue.discard(sequence_id)
        self._removing.discard(sequence_id)
        self._announcements.leave(sequence_id)
        self._copies.cancel(sequence_id)
        if self._drafts is not None:
            self._drafts.forget(sequence_id)
        return sequence

    def _give_slots_to_handed_over(self) -> None:
        for sequence_id in list(self._handed_over):
            if len(self._running) == self._limits.max_running:
                return
            self._running[sequence_id] = self._handed_over.pop(sequence_id)

    def _plan_decodes(self) -> list[ChunkPlan]:
        """A token of each decoding sequence, oldest first, so that one preempted for a page is not in the batch yet."""
        plans: list[ChunkPlan] = []
        decoding = [sequence for sequence in self._running.values() if sequence.decodes]
        for sequence in sorted(decoding, key=lambda sequence: sequence.seniority):
            if sequence.sequence_id in self._running and self._take_page_for_next_token(sequence):
                plans.append(ChunkPlan(sequence=sequence, num_tokens=1))
        return plans

    def _take_page_for_next_token(self, sequence: Sequence) -> bool:
        """False when the sequence has to wait for a page."""
        if sequence.num_computed < len(sequence.page_indices) * self._page_slots:
            return True
        while self._pool.num_free == 0:
            generating = [running for running in self._running.values() if running.generates]
            victim = max(self._handed_over.values() or generating, key=lambda candidate: candidate.seniority)
            if victim is sequence:
                return False
            self._preempt(victim)
        sequence.page_indices += self._pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._take_out(sequence.sequence_id)
        self._pool.release(sequence.page_indices)
        sequence.page_indices.clear()
        sequence.num_computed = 0
        sequence.carry_slot = None
        sequence.draft_token_ids = ()
        self._waiting[sequence.sequence_id] = sequence
        self._queue.add(sequence, preempted=True)
        self.num_preemptions += 1

    def _plan_prefills(self, *, num_batch_tokens: int) -> list[ChunkPlan]:
        """Chunks in the queue's order. When one prompt can't get its pages, no later one slips past it: else a long
        prompt might never find enough pages free."""
        plans: list[ChunkPlan] = []
        admitting = True
        for sequence in self._queue:
            num_allowed = self._limits.saturation_tokens if plans else self._limits.max_batch_tokens
            if num_batch_tokens >= num_allowed:
                break
            if sequence.sequence_id in self._waiting:
                admitting = admitting and self._admit(sequence)
                if not admitting:
                    continue
            num_tokens = min(_num_tokens_at_once(sequence), num_allowed - num_batch_tokens)
            plans.append(ChunkPlan(sequence=sequence, num_tokens=num_tokens))
            num_batch_tokens += num_tokens
        return plans

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and the pages of all its tokens to compute; False when either is short.

        A page for each generating sequence that runs is left free: taking the last pages now would only mean to preempt
        the newcomer when they are needed.
        """
        num_pages = div_ceil(sequence.compute_stop, self._page_slots)
        if len(self._running) == self._limits.max_running or num_pages + self._num_generating > self._pool.num_free:
            return False
        sequence.page_indices += self._pool.allocate(num_pages)
        self._running[sequence.sequence_id] = self._waiting.pop(sequence.sequence_id)
        return True


def _num_tokens_at_once(sequence: Sequence) -> int:
    """Of one chunk. Where logprobs of the prompt are wanted it ends with the prompt, so that it is clear of which
    tokens: output follows after a preemption."""
    sampling = sequence.sampling
    if sampling is None or sampling.num_prompt_logprobs is None or sequence.num_computed >= sequence.num_prompt_tokens:
        return sequence.num_uncomputed
    return sequence.num_prompt_tokens - sequence.num_computed
