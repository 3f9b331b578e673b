"""Which experts each token goes through, and with what weight. Whole on every rank, and in float32 whatever the dtype.

Shape suffixes: T tokens, E hidden, X experts, G groups of experts, K chosen experts of a token.
"""

from typing import assert_never

import torch
from torch import nn

from pdserve.model.experts_config import ExpertsConfig, GroupScore, Scoring
from pdserve.model.products import Linear
from pdserve.model.weight_rows import Rows, Sources

_MIN_SUM = 1e-20
"""Against division by 0; far below any sum of scores."""


class Router(nn.Module):
    def __init__(self, config: ExpertsConfig, *, hidden_dim: int) -> None:
        super().__init__()
        self._config = config
        self.gate = Linear(hidden_dim, config.num_experts)
        self.correction_X = nn.Parameter(torch.empty(config.num_experts)) if config.has_correction else None

    def forward(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(expert_TK, weight_TK)."""
        scores_TX = self._scores(self.gate(x_TE.float()))
        merits_TX = scores_TX if self.correction_X is None else scores_TX + self.correction_X
        if self._config.num_groups > 1:
            merits_TX = self._within_best_groups(merits_TX)
        expert_TK = merits_TX.topk(self._config.num_chosen, dim=-1).indices
        weight_TK = scores_TX.gather(1, expert_TK)
        if self._config.has_unit_sum:
            weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + _MIN_SUM)
        return expert_TK, weight_TK * self._config.weight_scale

    def _scores(self, products_TX: torch.Tensor) -> torch.Tensor:
        match self._config.scoring:
            case Scoring.SOFTMAX:
                return products_TX.softmax(dim=-1)
            case Scoring.SIGMOID:
                # In float32 its bits depend on the place of an element among all: whether it falls into a whole vector.
                return products_TX.double().sigmoid().float()
            case _:
                assert_never(self._config.scoring)

    def _within_best_groups(self, merits_TX: torch.Tensor) -> torch.Tensor:
        """Minus infinity outside the groups that are chosen."""
        merits_TGX = merits_TX.view(-1, self._config.num_groups, self._config.group_experts)
        match self._config.group_score:
            case GroupScore.BEST:
                groups_TG = merits_TGX.amax(dim=-1)
            case GroupScore.BEST_TWO:
                groups_TG = merits_TGX.topk(2, dim=-1).values.sum(dim=-1)
            case _:
                assert_never(self._config.group_score)
        chosen = groups_TG.topk(self._config.num_chosen_groups, dim=-1).indices
        is_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter(1, chosen, False)
        return merits_TGX.masked_fill(is_out_TG[:, :, None], float("-inf")).flatten(1)

    def sources(self) -> Sources:
        sources = {"gate.weight": (Rows(tensor="weight", keeps_float32=True),)}
        if self.correction_X is not None:
            sources["correction_X"] = (Rows(tensor="e_score_correction_bias", keeps_float32=True),)
        return sources
