"""What the heads that guess tokens from hidden states have in common: DeepSeek's MTP modules and EAGLE heads.

The pairs are those of `engine/drafter.py`: each token goes in with the hidden state of the token before it, and what
comes out guesses the token after it.

Shape suffixes: T tokens of all sequences of a pass, one after another; E hidden; W chosen rows; V vocabulary.
"""

from typing import Protocol

import torch

from pdserve.model.attention import AttentionCache
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import OnLayer


class DraftHeadModule(Protocol):
    """Whole, on one rank. `load_mtp` and `load_eagle` give modules of torch that are such heads."""

    config: ModelConfig
    """Of the head's own layers: `kv_layout` gives the layout of its cache."""

    def forward(
        self,
        token_ids_T: torch.Tensor,
        previous_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cache: AttentionCache,
        on_layer: OnLayer,
    ) -> torch.Tensor:
        """states_TE: to guess from, and what the head takes as `previous` of the token that is guessed.

        `previous_TE` is the model's hidden state of the token before, after the final norm; where the model has not
        seen that token yet, what this returned for it. `positions_T` are places in the head's cache, which begin at 0
        with the pair of token 1.
        Requires: every position below `config.max_model_len`.
        """
        ...

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """logits_WV of the next token, over the whole vocabulary."""
        ...
