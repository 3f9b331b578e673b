"""One request on its decode worker: what was asked, how far its prompt is, and the choices that answer it."""

from collections.abc import Callable, Sequence
from enum import Enum

import msgspec

from pdserve.decode.choice import Choice, ChoicePhase
from pdserve.decode.deltas import deltas_of_prompt
from pdserve.ids import HandoffId, RequestId, SequenceId, TailSlot
from pdserve.sampling import TokenLogprobs
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.text.tokenizer import Tokenizer
from pdserve.units import seconds_to_ns
from pdserve.wire.cluster import MAX_GENERATED_ENTRIES, Delta, Generate, PrefillPlace


class Phase(Enum):
    PENDING = "pending"
    """Waits for pages, or for a place in the schedule."""
    HANDOFF = "handoff"
    """A prefill worker computes and pushes; not schedulable (H1)."""
    SCHEDULED = "scheduled"
    """The scheduler has what computes its prompt, or answers."""
    ENDED = "ended"


class LocalReason(Enum):
    """Why a prompt is prefilled on the decode worker."""

    ROUTED = "routed"
    """The gateway chose so: colocated, or a prompt of one token."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """They are wanted, and a prefill worker has none to hand over."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """There is none, or the chosen one is not connected."""
    QUARANTINE = "quarantine"
    REFUSED = "refused"
    """The prefill worker was too busy."""
    HANDOFF_FAILED = "handoff_failed"


class HandoffOutcome(Enum):
    """What became of a request's handoff."""

    LANDED = "landed"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"


class Request:
    """The state that outlives its sequences' trips through handoff, schedule and preemption."""

    def __init__(
        self, generate: Generate, *, new_sequence_id: Callable[[], SequenceId], tokenizer: Tokenizer, now_ns: int
    ) -> None:
        self.generate = generate
        self.choices = tuple(
            Choice(
                index,
                request_id=generate.request_id,
                sequence_id=new_sequence_id(),
                sampling=generate.sampling,
                tokenizer=tokenizer,
            )
            for index in range(generate.num_choices)
        )
        self.phase = Phase.PENDING
        self.handoff_id: HandoffId | None = None
        self.tail_slot: TailSlot | None = None
        """Ours: the hidden state that a drafter begins with."""
        self.deadline_ns = now_ns + seconds_to_ns(generate.timeout_s)
        self.local_reason: LocalReason | None = None
        self.arrival_ns = now_ns
        self.instants = RequestInstants().at(Instant.ACCEPTED, now_ns)
        self.arrivals_ns: tuple[int, ...] = ()
        """The instant of each write of the handoff, for a traced request."""
        self._num_prompt_logprobs_told = 0
        self._has_told_place = False

    @property
    def request_id(self) -> RequestId:
        return self.generate.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.generate.prompt_token_ids)

    @property
    def waiting_choices(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.phase is ChoicePhase.WAITING]

    @property
    def is_answered(self) -> bool:
        return all(choice.phase is ChoicePhase.DONE for choice in self.choices)

    @property
    def handoff_outcome(self) -> HandoffOutcome | None:
        """Of a request that ended; None when there was no handoff."""
        if Instant.GRANTED not in self.instants.times_ns:
            return None
        if Instant.LANDED in self.instants.times_ns:
            return HandoffOutcome.LANDED
        match self.local_reason:
            case LocalReason.REFUSED:
                return HandoffOutcome.REFUSED
            case LocalReason.HANDOFF_FAILED:
                return HandoffOutcome.FAILED
            case _:
                return HandoffOutcome.CANCELLED

    def mark(self, instant: Instant, now_ns: int) -> None:
        """Note an instant, unless it was noted before."""
        if instant not in self.instants.times_ns:
            self.instants = self.instants.at(instant, now_ns)

    def tell(self, choice: Choice, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None) -> Delta:
        """What goes out of the tokens that a choice got in one step."""
        return self._with_place(choice.accept(token_ids, logprobs))

    def tell_prompt(self, start: int, entries: Sequence[TokenLogprobs]) -> list[Delta]:
        """What goes out of the logprobs of the prompt tokens from `start` on: each once, also when computed again."""
        untold = entries[max(0, 1 + self._num_prompt_logprobs_told - start) :]
        self._num_prompt_logprobs_told += len(untold)
        deltas = deltas_of_prompt(self.request_id, untold, max_entries=MAX_GENERATED_ENTRIES)
        return [self._with_place(delta) for delta in deltas]

    def _with_place(self, delta: Delta) -> Delta:
        """The first delta of a request says where its prompt was prefilled."""
        if self._has_told_place:
            return delta
        self._has_told_place = True
        place = PrefillPlace.REMOTE if self.local_reason is None else PrefillPlace.LOCAL
        return msgspec.structs.replace(delta, prefill=place)
