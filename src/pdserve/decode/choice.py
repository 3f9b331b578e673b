"""One of the answers that a request wants: its sequence, its end, and its text."""

from enum import Enum

import msgspec

from pdserve.decode.answer_text import AnswerText
from pdserve.ids import RequestId, SequenceId
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.cluster import Delta, FinishReason

NUM_SEEDS = 2**64


class ChoicePhase(Enum):
    WAITING = "waiting"
    """For its prompt, or for a place in the schedule."""
    SCHEDULED = "scheduled"
    """The scheduler has its sequence."""
    DONE = "done"
    """Finished, or given up with its request."""


class Choice:
    """What one answer needs to know of itself.

    Choice i samples with `seed + i`, so that it is what a request for one answer with that seed would get. The logprobs
    of the prompt are choice 0's.
    """

    def __init__(
        self,
        index: int,
        *,
        request_id: RequestId,
        sequence_id: SequenceId,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.index = index
        self.sequence_id = sequence_id
        self.phase = ChoicePhase.WAITING
        self.num_generated = 0
        self._request_id = request_id
        self._sampling = sampling
        eos_token_ids = frozenset[int]() if sampling.ignore_eos else tokenizer.eos_token_ids
        self._end_token_ids = eos_token_ids.union(sampling.stop_token_ids)
        self._text = AnswerText(tokenizer, stop=sampling.stop, skip_special_tokens=sampling.skip_special_tokens)

    @property
    def sampling(self) -> SamplingParams:
        """What the engine is told: to it, whatever ends the answer is a stop token."""
        seed = self._sampling.seed
        return msgspec.structs.replace(
            self._sampling,
            stop_token_ids=tuple(sorted(self._end_token_ids)),
            seed=(seed + self.index) % NUM_SEEDS if seed is not None else None,
            num_prompt_logprobs=self._sampling.num_prompt_logprobs if self.index == 0 else None,
        )

    def accept(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None) -> Delta:
        """The delta of the tokens of one step, with the finish reason when one of them ends the answer.

        Tokens after that one were sampled for nothing and are left out.
        """
        reason = None
        num_accepted = 0
        for token_id, entry in zip(token_ids, logprobs or (None,) * len(token_ids), strict=True):
            num_accepted += 1
            reason = self._accept_one(token_id, entry)
            if reason is not None:
                break
        text, entries = self._text.take()
        return Delta(
            request_id=self._request_id,
            choice_index=self.index,
            token_ids=token_ids[:num_accepted],
            text=text,
            entries=entries,
            finish_reason=reason,
        )

    def _accept_one(self, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        self.num_generated += 1
        may_end = self.num_generated > self._sampling.min_tokens
        if may_end and token_id in self._end_token_ids:
            self._text.finish(may_stop=True)
            return FinishReason.STOP
        if self._text.add(token_id, logprobs, may_stop=may_end):
            return FinishReason.STOP
        if self.num_generated >= self._sampling.max_tokens:
            self._text.finish(may_stop=may_end)
            return FinishReason.LENGTH
        return None
