"""One request on its decode worker: what was asked, how far its prompt is, and the choices that answer it."""

from collections.abc import Callable, Sequence
from enum import Enum

import msgspec

from pdserve.decode.choice import Choice, ChoicePhase
from pdserve.decode.deltas import deltas_of_prompt
from pdserve.ids import HandoffId, Incarnation, RequestId, SequenceId, TailSlot
from pdserve.sampling import TokenLogprobs
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.text.tokenizer import Tokenizer
from pdserve.units import seconds_to_ns
from pdserve.wire.cluster import MAX_GENERATED_ENTRIES, Delta, Generate, PrefillPlace, Told, resumes_apart


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
    RESUMED = "resumed"
    """Several answers that were begun elsewhere go on, each from tokens of its own."""
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
        """Requires: what was told leaves a choice to answer."""
        self.generate = generate
        told = generate.told or (Told(),) * generate.num_choices
        self.choices = tuple(
            Choice(
                index,
                request_id=generate.request_id,
                sequence_id=new_sequence_id(),
                sampling=generate.sampling,
                tokenizer=tokenizer,
                told=told[index],
            )
            for index in range(generate.num_choices)
        )
        self.lead = self.waiting_choices[0]
        """The choice that the prompt is computed as."""
        self.resumes_apart = resumes_apart(told)
        """Each choice computes its own tokens; no other begins from the pages of the lead's."""
        self.phase = Phase.PENDING
        self.handoff_id: HandoffId | None = None
        self.tail_slot: TailSlot | None = None
        """Ours: the hidden state that a drafter begins with."""
        self.deadline_ns = now_ns + seconds_to_ns(generate.timeout_s)
        self.local_reason: LocalReason | None = None
        self.asked_peers: list[Incarnation] = []
        """Prefill workers that had a grant."""
        self.handoff_failure: LocalReason | None = None
        """Of the last one, while no other is asked."""
        self.arrival_ns = now_ns
        self.instants = RequestInstants().at(Instant.ACCEPTED, now_ns)
        self.arrivals_ns: tuple[int, ...] = ()
        """The instant of each write of the handoff, for a traced request."""
        self._num_prompt_logprobs_told = generate.num_prompt_logprobs_told
        self._has_told_place = False

    @property
    def request_id(self) -> RequestId:
        return self.generate.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.generate.prompt_token_ids)

    def token_ids_of(self, choice: Choice) -> tuple[int, ...]:
        """Those that are computed before it samples: of the prompt, and kept ones."""
        return self.generate.prompt_token_ids + choice.kept_token_ids

    @property
    def num_waiting_tokens(self) -> int:
        """To be computed before all choices that wait sample."""
        apart = self.waiting_choices if self.resumes_apart else [self.lead]
        return sum(self.num_prompt_tokens + len(choice.kept_token_ids) for choice in apart)

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
        match self.handoff_failure:
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

    def tell(
        self, choice: Choice, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None
    ) -> Delta | None:
        """What goes out of the tokens that a choice got in one step; None: the client has it."""
        delta = choice.accept(token_ids, logprobs)
        return None if delta is None else self._with_place(delta)

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
