"""Which tokens of which sequences go into the next forward pass, and which pages hold their KV.

A batch is filled in this order:

1. One token for each sequence that decodes: it generates, and all its tokens but the last have their KV. A sequence
   whose KV was handed over begins here, without queueing.
2. Chunks of prompts in the order of `prefill_queue`. The first may fill the batch up to `max_batch_tokens`; the next
   ones only fill it up to `saturation_tokens`. Up to there a pass takes hardly longer for more tokens, so short prompts
   share one; beyond, its time is linear in its tokens, and a chunk of a long prompt would only delay the end of the
   short ones in the same pass.

Pages. A prompt gets all its pages when its first chunk is scheduled, so it never waits half computed for pages that
another half computed one holds. A decode takes a page when its next token needs one. When none is free, the youngest
generating sequence is preempted: it gives back its pages and computes them again later. One that still waits for a
running slot goes first, however old: else it could wait for the slot of a sequence that waits for its pages. A sequence
that is itself the youngest waits instead, with its pages.

Why this ends: the oldest running sequence that generates gets any page it needs from another one, or is the only one,
and then has all pages that are not held by prefill-only sequences or outside the scheduler, which come back by
themselves; no sequence is accepted that the whole pool could not hold. A preemption pays for a token that is never
lost, so there are no more preemptions than tokens.
"""

from pdserve.errors import CapacityError, ContextOverflow, InternalError
from pdserve.ids import SequenceId
from pdserve.kv.pages import PagePool
from pdserve.schedule.batch import Batch, BatchResult, Chunk, NewSequence
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.outcome import StepOutcome
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

    def __init__(self, *, pool: PagePool, page_slots: int, limits: ScheduleLimits) -> None:
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
        self._announced: set[SequenceId] = set()
        """Generating sequences that the executor knows."""
        self._ended: set[SequenceId] = set()
        """Sequences that the executor knows and the next batch tells it to forget."""
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

    def require_fits(self, sequence: Sequence) -> None:
        """Raises: `ContextOverflow` when the whole pool could not hold the sequence at its longest.

        `add` asks the same; ask before a handoff, so that no prompt is computed in vain.
        """
        num_tokens = sequence.compute_stop
        if sequence.sampling is not None:
            # The last token of an output is never computed.
            num_tokens = sequence.num_prompt_tokens + sequence.sampling.max_tokens - 1
        num_pages = div_ceil(num_tokens, self._page_slots)
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
        chunks = self._decode_chunks()
        chunks += self._prefill_chunks(num_batch_tokens=len(chunks))
        if not chunks:
            return None
        for chunk in chunks:
            sequence = self._running[chunk.sequence_id]
            if sequence.scheduled_ns is None:
                sequence.scheduled_ns = now_ns
        new_sequences = self._announce(chunks)
        self._batch = Batch(
            pass_index=self._num_passes,
            chunks=tuple(chunks),
            new_sequences=new_sequences,
            ended_sequences=tuple(sorted(self._ended)),
        )
        self._ended.clear()
        self._num_passes += 1
        return self._batch

    def complete(self, result: BatchResult) -> StepOutcome:
        """Apply what the running batch computed.

        Raises: `InternalError` when the result is not that batch's; nothing changed then.
        """
        chunks = self._require_matching(result)
        self._batch = None
        tokens = dict(result.sampled)
        outcome = StepOutcome(logprobs=dict(result.logprobs))
        for chunk in chunks:
            sequence = self._running[chunk.sequence_id]
            sequence.num_computed = chunk.stop
            if sequence.sequence_id in self._removing:
                outcome.removed.append(self._take_out(sequence.sequence_id))
            elif chunk.samples:
                sequence.token_ids.append(tokens[sequence.sequence_id])
                outcome.sampled.append((sequence, tokens[sequence.sequence_id]))
                self._queue.discard(sequence.sequence_id)
            elif sequence.num_uncomputed == 0:
                outcome.prefilled.append(self._take_out(sequence.sequence_id))
            elif _decodes(sequence):
                self._queue.discard(sequence.sequence_id)
            else:
                self._queue.reorder(sequence)
        return outcome

    def _require_runnable(self, sequence: Sequence) -> None:
        subject = f"sequence {sequence.sequence_id}"
        if self._holds(sequence.sequence_id):
            raise InternalError(f"{subject} is in the scheduler already")
        if sequence.num_uncomputed < 1:
            raise InternalError(f"{subject} has nothing to compute")
        num_covered = len(sequence.page_indices) * self._page_slots
        is_fresh = not sequence.page_indices and sequence.num_computed == 0
        is_handed_over = _decodes(sequence) and sequence.num_computed <= num_covered
        if not is_fresh and not is_handed_over:
            raise InternalError(
                f"{subject} brings {len(sequence.page_indices)} pages with {sequence.num_computed} of "
                f"{len(sequence.token_ids)} tokens computed: bring none, or all but the last token"
            )
        self.require_fits(sequence)

    def _require_matching(self, result: BatchResult) -> tuple[Chunk, ...]:
        if self._batch is None or self._batch.pass_index != result.pass_index:
            running = "none" if self._batch is None else str(self._batch.pass_index)
            raise InternalError(f"pass {result.pass_index} came back, but the running one is {running}")
        expected = [chunk.sequence_id for chunk in self._batch.chunks if chunk.samples]
        if [sequence_id for sequence_id, _ in result.sampled] != expected:
            raise InternalError(f"pass {result.pass_index} should have sampled for {expected}, not {result.sampled}")
        return self._batch.chunks

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
        if sequence_id in self._announced:
            self._announced.discard(sequence_id)
            self._ended.add(sequence_id)
        return sequence

    def _give_slots_to_handed_over(self) -> None:
        for sequence_id in list(self._handed_over):
            if len(self._running) == self._limits.max_running:
                return
            self._running[sequence_id] = self._handed_over.pop(sequence_id)

    def _decode_chunks(self) -> list[Chunk]:
        """A token of each decoding sequence, oldest first, so that one preempted for a page is not in the batch yet."""
        chunks: list[Chunk] = []
        for sequence in sorted(filter(_decodes, self._running.values()), key=_seniority):
            if sequence.sequence_id in self._running and self._take_page_for_next_token(sequence):
                chunks.append(self._chunk(sequence, num_tokens=1))
        return chunks

    def _take_page_for_next_token(self, sequence: Sequence) -> bool:
        """False when the sequence has to wait for a page."""
        if sequence.num_computed < len(sequence.page_indices) * self._page_slots:
            return True
        if self._pool.num_free == 0:
            candidates = self._handed_over.values() or filter(_generates, self._running.values())
            victim = max(candidates, key=_seniority)
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
        self._waiting[sequence.sequence_id] = sequence
        self._queue.add(sequence, preempted=True)
        self.num_preemptions += 1

    def _prefill_chunks(self, *, num_batch_tokens: int) -> list[Chunk]:
        """Chunks in the queue's order. When one prompt can't get its pages, no later one slips past it: else a long
        prompt might never find enough pages free."""
        chunks: list[Chunk] = []
        admitting = True
        for sequence in self._queue:
            num_allowed = self._limits.saturation_tokens if chunks else self._limits.max_batch_tokens
            if num_batch_tokens >= num_allowed:
                break
            if sequence.sequence_id in self._waiting:
                admitting = admitting and self._admit(sequence)
                if not admitting:
                    continue
            num_tokens = min(sequence.num_uncomputed, num_allowed - num_batch_tokens)
            chunks.append(self._chunk(sequence, num_tokens=num_tokens))
            num_batch_tokens += num_tokens
        return chunks

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and the pages of all its tokens to compute; False when either is short.

        A page for each generating sequence that runs is left free: it will need one before it has decoded `page_slots`
        tokens, and taking the last pages now would only mean to preempt the newcomer then.
        """
        num_pages = div_ceil(sequence.compute_stop, self._page_slots)
        num_reserved = sum(map(_generates, self._running.values()))
        if len(self._running) == self._limits.max_running or num_pages + num_reserved > self._pool.num_free:
            return False
        sequence.page_indices += self._pool.allocate(num_pages)
        self._running[sequence.sequence_id] = self._waiting.pop(sequence.sequence_id)
        return True

    def _chunk(self, sequence: Sequence, *, num_tokens: int) -> Chunk:
        start, stop = sequence.num_computed, sequence.num_computed + num_tokens
        is_last = stop == sequence.compute_stop
        return Chunk(
            sequence_id=sequence.sequence_id,
            start=start,
            token_ids=tuple(sequence.token_ids[start:stop]),
            page_indices=tuple(sequence.page_indices[: div_ceil(stop, self._page_slots)]),
            samples=is_last and _generates(sequence),
            tail_slot=sequence.tail_slot if is_last and not _generates(sequence) else None,
        )

    def _announce(self, chunks: list[Chunk]) -> tuple[NewSequence, ...]:
        """What the executor must be told before it samples. One that it was about to forget it simply keeps."""
        new_sequences: list[NewSequence] = []
        for chunk in chunks:
            sequence = self._running[chunk.sequence_id]
            if not chunk.samples or sequence.sampling is None or sequence.sequence_id in self._announced:
                continue
            self._announced.add(sequence.sequence_id)
            if sequence.sequence_id in self._ended:
                self._ended.discard(sequence.sequence_id)
                continue
            prompt_stop = sequence.num_prompt_tokens
            new_sequences.append(
                NewSequence(
                    sequence_id=sequence.sequence_id,
                    prompt_token_ids=tuple(sequence.token_ids[:prompt_stop]),
                    output_token_ids=tuple(sequence.token_ids[prompt_stop:]),
                    sampling=sequence.sampling,
                )
            )
        return tuple(new_sequences)


def _generates(sequence: Sequence) -> bool:
    return sequence.sampling is not None


def _decodes(sequence: Sequence) -> bool:
    """True for a sequence whose next token follows from one token: all before it have their KV."""
    return _generates(sequence) and sequence.num_uncomputed == 1


def _seniority(sequence: Sequence) -> tuple[int, SequenceId]:
    return sequence.arrival_ns, sequence.sequence_id
