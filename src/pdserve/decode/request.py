"""One request on its decode worker: what was asked, how far it is, and the text that may go out."""

from enum import Enum

import msgspec

from pdserve.decode.answer_text import AnswerText
from pdserve.ids import HandoffId, RequestId, SequenceId
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.text.tokenizer import Tokenizer
from pdserve.units import seconds_to_ns
from pdserve.wire.cluster import Delta, FinishReason, Generate, PrefillPlace


class Phase(Enum):
    PENDING = "pending"
    """Waits for pages, or for a place in the schedule."""
    HANDOFF = "handoff"
    """A prefill worker computes and pushes; not schedulable (H1)."""
    SCHEDULED = "scheduled"
    """The scheduler has its sequence."""
    ENDED = "ended"


class LocalReason(Enum):
    """Why a prompt is prefilled on the decode worker."""

    ROUTED = "routed"
    """The gateway chose so: colocated, or a prompt of one token."""
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
    """The state that outlives a sequence's trips through handoff, schedule and preemption."""

    def __init__(self, generate: Generate, *, sequence_id: SequenceId, tokenizer: Tokenizer, now_ns: int) -> None:
        self.generate = generate
        self.sequence_id = sequence_id
        self.phase = Phase.PENDING
        self.handoff_id: HandoffId | None = None
        self.deadline_ns = now_ns + seconds_to_ns(generate.timeout_s)
        self.local_reason: LocalReason | None = None if generate.prefill is not None else LocalReason.ROUTED
        self.arrival_ns = now_ns
        self.instants = RequestInstants().at(Instant.ACCEPTED, now_ns)
        self.arrivals_ns: tuple[int, ...] = ()
        """The instant of each write of the handoff, for a traced request."""
        self.num_generated = 0
        eos_token_ids = frozenset[int]() if generate.sampling.ignore_eos else tokenizer.eos_token_ids
        self._end_token_ids = eos_token_ids.union(generate.sampling.stop_token_ids)
        self._text = AnswerText(tokenizer, stop=generate.sampling.stop)

    @property
    def sampling(self) -> SamplingParams:
        """What the engine is told: to it, whatever ends the answer is a stop token."""
        return msgspec.structs.replace(self.generate.sampling, stop_token_ids=tuple(sorted(self._end_token_ids)))

    @property
    def request_id(self) -> RequestId:
        return self.generate.request_id

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

    def accept(self, token_id: int, logprobs: TokenLogprobs | None = None) -> Delta:
        """The delta of one sampled token, with the finish reason when it is the last one."""
        sampling = self.generate.sampling
        is_first = self.num_generated == 0
        self.num_generated += 1
        may_end = self.num_generated > sampling.min_tokens
        reason = None
        if may_end and token_id in self._end_token_ids:
            reason = FinishReason.STOP
            self._text.finish(may_stop=True)
        elif self._text.add(token_id, logprobs, may_stop=may_end):
            reason = FinishReason.STOP
        elif self.num_generated >= sampling.max_tokens:
            reason = FinishReason.LENGTH
            self._text.finish(may_stop=may_end)
        return self._delta(token_id, reason, is_first=is_first)

    def _delta(self, token_id: int, reason: FinishReason | None, *, is_first: bool) -> Delta:
        place = PrefillPlace.REMOTE if self.local_reason is None else PrefillPlace.LOCAL
        text, entries = self._text.take()
        return Delta(
            request_id=self.request_id,
            token_ids=(token_id,),
            text=text,
            entries=entries,
            finish_reason=reason,
            prefill=place if is_first else None,
        )
