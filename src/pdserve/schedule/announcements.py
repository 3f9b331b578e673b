"""What the engine has been told of the sequences, and is still to be told."""

from collections.abc import Iterable

from pdserve.ids import SequenceId
from pdserve.schedule.batch import NewSequence
from pdserve.schedule.chunk_plan import ChunkPlan


class Announcements:
    """A sequence that leaves, if only by a preemption, is told to have ended; it is announced anew when it is back.

    Threads: one.
    """

    def __init__(self) -> None:
        self._in_batches: set[SequenceId] = set()
        """Sequences that the engine has met and not yet been told to forget."""
        self._announced: set[SequenceId] = set()
        """Those of them whose sampling parameters it has."""
        self._ended: set[SequenceId] = set()
        """Sequences that the next batch tells it to forget."""

    def leave(self, sequence_id: SequenceId) -> None:
        if sequence_id in self._in_batches:
            self._in_batches.discard(sequence_id)
            self._announced.discard(sequence_id)
            self._ended.add(sequence_id)

    def take_ended(self) -> tuple[SequenceId, ...]:
        ended = tuple(sorted(self._ended))
        self._ended.clear()
        return ended

    def announce(self, plans: Iterable[ChunkPlan]) -> tuple[NewSequence, ...]:
        """What must be known of them before this batch is sampled."""
        new_sequences: list[NewSequence] = []
        for plan in plans:
            sequence = plan.sequence
            self._in_batches.add(sequence.sequence_id)
            if sequence.sequence_id in self._announced or sequence.sampling is None or not plan.samples:
                continue
            self._announced.add(sequence.sequence_id)
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
