"""One of the answers that a request wants: its sequence, its end, and its text."""

from enum import Enum

import msgspec

from pdserve.decode.answer_text import AnswerText
from pdserve.ids import RequestId, SequenceId
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.cluster import Delta, FinishReason, Told

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

    One that was begun on a worker that was lost keeps the tokens that the client has. Their logprobs can't be kept, so
    where they are wanted it keeps those whose entries the client has, and generates the rest anew, as the same tokens.
    What the client has is muted:

        tokens of the answer = [ kept | generated anew, muted | told )
    """

    def __init__(
        self,
        index: int,
        *,
        request_id: RequestId,
        sequence_id: SequenceId,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        told: Told,
    ) -> None:
        self.index = index
        self.sequence_id = sequence_id
        self.phase = ChoicePhase.DONE if told.is_finished else ChoicePhase.WAITING
        num_kept = len(told.token_ids) if sampling.num_top_logprobs is None else told.num_entries
        self.kept_token_ids = told.token_ids[:num_kept]
        self.num_generated = 0
        """The kept ones too."""
        self._num_muted_tokens = len(told.token_ids) - len(self.kept_token_ids)
        self._num_muted_chars = told.num_text_chars
        self._request_id = request_id
        self._sampling = sampling
        eos_token_ids = frozenset[int]() if sampling.ignore_eos else tokenizer.eos_token_ids
        self._end_token_ids = eos_token_ids.union(sampling.stop_token_ids)
        self._text = AnswerText(tokenizer, stop=sampling.stop, skip_special_tokens=sampling.skip_special_tokens)
        for token_id in self.kept_token_ids:
            self._accept_one(token_id, None)

    @property
    def has_sampled(self) -> bool:
        """On this worker."""
        return self.num_generated > len(self.kept_token_ids)

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

    def accept(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None) -> Delta | None:
        """The delta of the tokens of one step, with the finish reason when one of them ends the answer.

        Tokens after that one were sampled for nothing and are left out. None: the client has all of it.
        """
        reason = None
        num_accepted = 0
        for token_id, entry in zip(token_ids, logprobs or (None,) * len(token_ids), strict=True):
            num_accepted += 1
            reason = self._accept_one(token_id, entry)
            if reason is not None:
                break
        text, entries = self._text.take()
        untold_token_ids, untold_text = self._mute(token_ids[:num_accepted], text)
        if not (untold_token_ids or untold_text or entries) and reason is None:
            return None
        return Delta(
            request_id=self._request_id,
            choice_index=self.index,
            token_ids=untold_token_ids,
            text=untold_text,
            entries=entries,
            finish_reason=reason,
        )

    def _mute(self, token_ids: tuple[int, ...], text: str) -> tuple[tuple[int, ...], str]:
        """What the client does not have of it."""
        if not (self._num_muted_tokens or self._num_muted_chars):
            return token_ids, text
        num_tokens = min(self._num_muted_tokens, len(token_ids))
        num_chars = min(self._num_muted_chars, len(text))
        self._num_muted_tokens -= num_tokens
        self._num_muted_chars -= num_chars
        return token_ids[num_tokens:], text[num_chars:]

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
