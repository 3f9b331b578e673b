"""From logits to tokens: biases, penalties, temperature, top-k, top-p, min-p and seeded noise, each row by itself.

A row's token depends on its logits, its sequence's parameters and earlier tokens, and on (seed, position) alone: never
on what else is in the batch. Order: biases, penalties, grammar, no early end, temperature, top-k, top-p (over what
top-k left), min-p (over what top-p left), draw.

The grammar goes before the least length: an answer that can't go on by its grammar ends, or fills up with tokens of
end of sequence until it may end. In the same way it goes on after its end where the end of sequence is to be ignored.

Shape suffixes: R rows (sequences that sample), V vocabulary, K candidates, most likely first; B biased tokens.
"""

import secrets
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pdserve.engine.grammar import Grammars, Guide
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import NewSequence

_NUM_CANDIDATES = 1024
"""Looked at first for top-p: sorting a vocabulary of 49,152 takes 3 ms a row, its top 1,024 a tenth of that."""


class _SamplerState:
    """What the sampler remembers of a sequence. Counts over the vocabulary exist only where a penalty needs them."""

    def __init__(self, new: NewSequence, *, vocab_size: int, guide: Guide | None) -> None:
        self.params = new.sampling
        self.guide = guide
        self.seed = new.sampling.seed if new.sampling.seed is not None else secrets.randbits(64)
        self.num_output_tokens = len(new.output_token_ids)
        self.output_counts_V: torch.Tensor | None = None
        self.in_prompt_V: torch.Tensor | None = None
        self.bias_ids_B = torch.tensor([token_id for token_id, _ in new.sampling.logit_bias], dtype=torch.int64)
        self.biases_B = torch.tensor([bias for _, bias in new.sampling.logit_bias])
        self.end_ids = [token_id for token_id in new.sampling.stop_token_ids if token_id < vocab_size]
        """A tokenizer may know tokens to end with that the model does not."""
        self.has_ended = False
        if has_penalty(new.sampling):
            self.output_counts_V = _counts(new.output_token_ids, vocab_size=vocab_size)
            self.in_prompt_V = _counts(new.prompt_token_ids, vocab_size=vocab_size) > 0

    def may_end_at(self, position: int) -> bool:
        return position >= self.params.min_tokens

    def record(self, token_id: int) -> None:
        ends = self.may_end_at(self.num_output_tokens) and token_id in self.end_ids
        self.num_output_tokens += 1
        self.has_ended = ends or self.num_output_tokens >= self.params.max_tokens
        if self.output_counts_V is not None:
            self.output_counts_V[token_id] += 1
        if self.guide is not None:
            self.guide.advance(token_id)


def has_penalty(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def draw_uniform(*, seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of (seed, position): a counter-based generator needs no state."""
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    raw = int(np.random.Philox(key=key).random_raw())
    return (raw >> 11) * 2.0**-53


class Sampler:
    def __init__(self, *, vocab_size: int, grammars: Grammars | None = None) -> None:
        """Without `grammars` there can be no sequence that asks for one."""
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._states: dict[SequenceId, _SamplerState] = {}

    def knows(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._states

    def num_top_logprobs(self, sequence_id: SequenceId) -> int | None:
        """As the sequence's parameters say."""
        return self._states[sequence_id].params.num_top_logprobs

    def has_ended(self, sequence_id: SequenceId) -> bool:
        """Whether the token sampled last ends the answer, as far as that depends on tokens alone."""
        return self._states[sequence_id].has_ended

    def add(self, new: NewSequence) -> None:
        """Its stop tokens are all that end the answer, end of sequence among them.

        Raises: `InternalError` for a token outside the vocabulary, or a grammar where there can be none.
        """
        biased = (token_id for token_id, _ in new.sampling.logit_bias)
        for token_id in (*new.prompt_token_ids, *new.output_token_ids, *biased):
            if not 0 <= token_id < self._vocab_size:
                raise InternalError(f"sequence {new.sequence_id} has token {token_id}, outside the vocabulary")
        guide = None
        if new.sampling.grammar is not None:
            if self._grammars is None:
                raise InternalError(f"sequence {new.sequence_id} has a grammar, for which this sampler was not made")
            guide = self._grammars.guide(new.sampling.grammar, new)
        self._states[new.sequence_id] = _SamplerState(new, vocab_size=self._vocab_size, guide=guide)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            state = self._states.pop(sequence_id, None)
            if state is not None and state.guide is not None:
                state.guide.close()

    def sample(self, logits_RV: torch.Tensor, sequence_ids: Sequence[SequenceId]) -> list[int]:
        """One token a row; the states move on by it. Requires: every sequence known. Overwrites `logits_RV`."""
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        token_ids = self._pick(logits_RV, states, num_ahead=1)
        for state, token_id in zip(states, token_ids, strict=True):
            state.record(token_id)
        return token_ids

    def propose(self, logits_RV: torch.Tensor, sequence_ids: Sequence[SequenceId], num_ahead: int) -> list[int]:
        """What `sample` would draw from such logits `num_ahead` tokens after the newest one, 1 for the next: with the
        noise of that position, and with the penalties so far; the grammar tells of the next token alone. The states
        stay. Overwrites `logits_RV`.

        A drafter whose logits are close to the model's is accepted most often so: both draw by the same number.
        """
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        return self._pick(logits_RV, states, num_ahead=num_ahead)

    def _pick(self, logits_RV: torch.Tensor, states: Sequence[_SamplerState], *, num_ahead: int) -> list[int]:
        positions = [state.num_output_tokens + num_ahead - 1 for state in states]
        _apply_biases(logits_RV, states)
        _apply_penalties(logits_RV, states)
        if num_ahead == 1:
            self._apply_grammars(logits_RV, states)
        _forbid_early_ends(logits_RV, states, positions)
        return _choose(logits_RV, states, positions)

    def _apply_grammars(self, logits_RV: torch.Tensor, states: Sequence[_SamplerState]) -> None:
        guided = [(row, state.guide) for row, state in enumerate(states) if state.guide is not None]
        if guided and self._grammars is not None:
            rows, guides = zip(*guided, strict=True)
            self._grammars.forbid_others(logits_RV, rows, guides)


def _choose(logits_RV: torch.Tensor, states: Sequence[_SamplerState], positions: Sequence[int]) -> list[int]:
    token_ids = [int(token_id) for token_id in logits_RV.argmax(dim=-1)]
    random_rows = [row for row, state in enumerate(states) if state.params.temperature > 0]
    if random_rows:
        drawn = _draw(
            logits_RV[random_rows], [states[row] for row in random_rows], [positions[row] for row in random_rows]
        )
        for row, token_id in zip(random_rows, drawn, strict=True):
            token_ids[row] = token_id
    return token_ids


def _counts(token_ids: Sequence[int], *, vocab_size: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(token_ids, dtype=torch.int64), minlength=vocab_size)


def _column(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)[:, None]


def _apply_biases(logits_RV: torch.Tensor, states: Sequence[_SamplerState]) -> None:
    for row, state in enumerate(states):
        if len(state.bias_ids_B):
            logits_RV[row, state.bias_ids_B] += state.biases_B


def _forbid_early_ends(logits_RV: torch.Tensor, states: Sequence[_SamplerState], positions: Sequence[int]) -> None:
    for row, (state, position) in enumerate(zip(states, positions, strict=True)):
        if state.end_ids and not state.may_end_at(position):
            ends_B = logits_RV[row, state.end_ids]
            logits_RV[row, state.end_ids] = -torch.inf
            if state.guide is not None and logits_RV[row].max() == -torch.inf:
                logits_RV[row, state.end_ids] = ends_B


def _apply_penalties(logits_RV: torch.Tensor, states: Sequence[_SamplerState]) -> None:
    penalised = [
        (row, state, state.output_counts_V, state.in_prompt_V)
        for row, state in enumerate(states)
        if state.output_counts_V is not None and state.in_prompt_V is not None
    ]
    if not penalised:
        return
    rows = [row for row, _, _, _ in penalised]
    params = [state.params for _, state, _, _ in penalised]
    counts_RV = torch.stack([counts_V for _, _, counts_V, _ in penalised])
    in_prompt_RV = torch.stack([in_prompt_V for _, _, _, in_prompt_V in penalised])
    repetition_R1 = _column(param.repetition_penalty for param in params).float()
    picked_RV = logits_RV[rows]
    weakened_RV = torch.where(picked_RV > 0, picked_RV / repetition_R1, picked_RV * repetition_R1)
    picked_RV = torch.where(in_prompt_RV | (counts_RV > 0), weakened_RV, picked_RV)
    picked_RV -= _column(param.frequency_penalty for param in params).float() * counts_RV
    picked_RV -= _column(param.presence_penalty for param in params).float() * (counts_RV > 0)
    logits_RV[rows] = picked_RV


def _draw(logits_RV: torch.Tensor, states: Sequence[_SamplerState], positions: Sequence[int]) -> list[int]:
    """Requires: every temperature above 0."""
    scaled_RV = logits_RV.double() / _column(state.params.temperature for state in states)
    # Not `exp`: with a grammar most logits are -inf, at which it takes ten times as long.
    weights_RV = torch.softmax(scaled_RV, dim=-1)
    uniform = [
        draw_uniform(seed=state.seed, position=position) for state, position in zip(states, positions, strict=True)
    ]
    token_ids = [0] * len(states)
    filtered: list[int] = []
    for row, state in enumerate(states):
        if state.params.top_k > 0 or state.params.top_p < 1 or state.params.min_p > 0:
            filtered.append(row)
        else:
            token_ids[row] = _inverse_cdf(weights_RV[row], uniform[row])
    if filtered:
        candidates = _candidates(weights_RV[filtered], [states[row].params for row in filtered])
        for row, (candidates_K, candidate_weights_K) in zip(filtered, candidates, strict=True):
            token_ids[row] = int(candidates_K[_inverse_cdf(candidate_weights_K, uniform[row])])
    return token_ids


def _inverse_cdf(weights_K: torch.Tensor, uniform: float) -> int:
    """The index whose share of the total weight contains `uniform`."""
    cumulative_K = weights_K.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative_K, cumulative_K[-1:] * uniform, right=True))
    return index if index < len(weights_K) else int(weights_K.nonzero()[-1])


def _candidates(weights_RV: torch.Tensor, params: Sequence[SamplingParams]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each row the tokens that top-k, top-p and min-p leave, with their weights."""
    vocab_size = weights_RV.shape[-1]
    num_looked_at = min(vocab_size, max(_NUM_CANDIDATES, *(param.top_k for param in params)))
    top_RK, ids_RK = weights_RV.topk(num_looked_at, dim=-1)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for row, param in enumerate(params):
        top_K, ids_K, total = top_RK[row], ids_RK[row], weights_RV[row].sum()
        if param.top_k > 0:
            top_K, ids_K = top_K[: param.top_k], ids_K[: param.top_k]
            total = top_K.sum()
        elif top_K.sum() < param.top_p * total and top_K[-1] >= param.min_p * top_K[0]:
            top_K, ids_K = weights_RV[row].sort(descending=True)
        mass_before_K = top_K.cumsum(dim=-1) - top_K
        is_kept_K = (mass_before_K < param.top_p * total) & (top_K >= param.min_p * top_K[0])
        num_kept = max(1, int(is_kept_K.sum()))
        kept.append((ids_K[:num_kept], top_K[:num_kept]))
    return kept
