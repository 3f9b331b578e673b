"""Grammars: which tokens may come next in an answer that has to match one.

Compiled on a thread of their own, from the moment a sequence is announced, beside the forward pass. Where a sequence is
in its grammar is a function of its output tokens alone.

An answer that is complete may go on with end-of-sequence tokens only. So may one whose grammar can't be compiled, or
takes the parser past its limits: the gateway has compiled it too, so that is a bug or an attack, and ends one answer.

Shape suffixes: R rows (sequences with a grammar), V vocabulary, W words of 32 tokens.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.schedule.batch import NewSequence
from pdserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_NUM_COMPILED = 64
"""Grammars kept. Clients send the same few again and again; a compiled one takes some 100 KiB."""

_DEADLINE_S = 60.0
"""For a grammar to be compiled. llguidance bounds its own work to well below a second; the first one of a process waits
for the tokenizer's tables too, 0.6 s for 49,152 tokens."""

_LIMITS = LLParserLimits(verbose_errors=False)
"""What clients send is not for the log."""

_PENALTIES_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)
"""What a byte of a mask adds to the logits of its 8 tokens. Looked up and added, a row of 49,152 tokens takes 30 us; as
booleans up to 250, because every other one comes as a surprise."""


class Guide:
    """Where one sequence is in its grammar. Threads: the runner's."""

    def __init__(self, sequence_id: SequenceId, matcher: "Future[LLMatcher]") -> None:
        self._sequence_id = sequence_id
        self._compiling = matcher
        self._is_reported = False

    def wait(self) -> None:
        """Until it is compiled. Raises: `InternalError` when that takes too long."""
        _ = self._matcher

    def fill(self, mask_RW: np.ndarray[tuple[int, int], np.dtype[np.int32]], row: int) -> None:
        """The tokens that may come next. Requires: room for the vocabulary of model and tokenizer."""
        fill_next_token_bitmask(self._matcher, mask_RW, row)
        if self._matcher.is_error() and not self._is_reported:
            self._is_reported = True
            _log.warning("grammar_failed sequence_id=%d error=%r", self._sequence_id, self._matcher.get_error())

    def advance(self, token_id: int) -> None:
        """A token that the grammar does not allow leaves nothing but the end."""
        self._matcher.consume_token(token_id)

    def close(self) -> None:
        """The sequence ended."""
        self._compiling.cancel()

    @cached_property
    def _matcher(self) -> LLMatcher:
        try:
            return self._compiling.result(timeout=_DEADLINE_S)
        except TimeoutError:
            raise InternalError(f"a grammar was not compiled in {_DEADLINE_S:.0f} s") from None


class Grammars:
    """Threads: the runner's; compiles on one of its own."""

    def __init__(self, model_dir: Path, *, vocab_size: int) -> None:
        """`vocab_size` is the model's. Reads the tokenizer when the first grammar comes."""
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiled = lru_cache(maxsize=_NUM_COMPILED)(self._compile)

    def guide(self, grammar: str, new: NewSequence) -> Guide:
        """At once: it is compiled beside what the caller does next."""
        return Guide(new.sequence_id, self._compiler.submit(self._matcher_after, grammar, new.output_token_ids))

    def forbid_others(self, logits_RV: torch.Tensor, rows: Sequence[int], guides: Sequence[Guide]) -> None:
        """All but the tokens that may come next become impossible. Requires: float32 logits in host memory."""
        for guide in guides:
            guide.wait()
        mask_RW = allocate_token_bitmask(len(guides), self._tokenizer.vocab_size)
        for index, guide in enumerate(guides):
            guide.fill(mask_RW, index)
        penalties_RV = _PENALTIES_OF_BYTE.take(mask_RW.view(np.uint8), axis=0).reshape(len(guides), -1)
        for row, penalties_V in zip(rows, penalties_RV[:, : logits_RV.shape[1]], strict=True):
            logits_RV[row] += torch.from_numpy(penalties_V)  # pyright: ignore[reportUnknownMemberType]

    def _matcher_after(self, grammar: str, output_token_ids: Sequence[int]) -> LLMatcher:
        """On the compiler's thread."""
        matcher = self._compiled(grammar).deep_copy()
        matcher.consume_tokens(list(output_token_ids))
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made on the compiler's thread, before any guide is ready."""
        tokenizer = Tokenizer.load(self._model_dir)
        return LLTokenizer(
            str(self._model_dir / "tokenizer.json"),
            # A model's vocabulary may be padded; a tokenizer may know tokens that the model does not.
            n_vocab=max(self._vocab_size, tokenizer.vocab_size),
            eos_token=sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < self._vocab_size),
        )
