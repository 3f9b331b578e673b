"""A mixture of experts: each token goes through the few experts that the router chose, and through the shared ones.

Every rank has its columns of every expert, so that all ranks have the same work whatever the router chooses. What is
gathered is gathered once for all (token, expert) pairs.

Shape suffixes: T tokens, E hidden, W this rank's hidden columns, F feed-forward columns, K chosen experts of a token,
P = T * K pairs, by expert.
"""

from collections.abc import Iterator

import torch
from torch import nn

from pdserve.model.experts_config import ExpertsConfig
from pdserve.model.feed_forward import FeedForward
from pdserve.model.parallel import Columns, Communicator, cut_columns
from pdserve.model.router import Router
from pdserve.model.weight_rows import Sources, nested


class Experts(nn.Module):
    """Returns all hidden columns on every rank."""

    def __init__(self, config: ExpertsConfig, *, hidden_dim: int, hidden: Columns, communicator: Communicator) -> None:
        super().__init__()
        self._hidden, self._communicator = hidden, communicator
        self._ffn = cut_columns(config.ffn_dim, communicator)
        self.router = Router(config, hidden_dim=hidden_dim)
        self.experts = nn.ModuleList(
            FeedForward(hidden_dim, ffn=self._ffn, hidden=hidden, communicator=communicator)
            for _ in range(config.num_experts)
        )
        self.shared: FeedForward | None = None
        if config.shared_ffn_dim > 0:
            shared_ffn = cut_columns(config.shared_ffn_dim, communicator)
            self.shared = FeedForward(hidden_dim, ffn=shared_ffn, hidden=hidden, communicator=communicator)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        columns_TW = self._routed_columns(x_TE)
        if self.shared is not None:
            columns_TW = columns_TW + self.shared.columns(x_TE)
        return self._communicator.gather_columns(columns_TW, self._hidden.widths)

    def _routed_columns(self, x_TE: torch.Tensor) -> torch.Tensor:
        expert_TK, weight_TK = self.router(x_TE)
        num_tokens, num_chosen = expert_TK.shape
        pair_of_P = expert_TK.flatten().argsort(stable=True)
        x_PE = x_TE[pair_of_P // num_chosen]
        runs = list(self._runs(expert_TK))
        gated_PF = torch.cat([expert.gate_up(x_PE[start:stop]) for expert, start, stop in runs])
        gated_PF = self._communicator.gather_columns(gated_PF, self._ffn.widths)
        down_PW = torch.cat([expert.down(gated_PF[start:stop]) for expert, start, stop in runs])
        by_token = torch.empty_like(down_PW)
        by_token[pair_of_P] = down_PW
        terms_TKW = by_token.view(num_tokens, num_chosen, -1) * weight_TK[:, :, None]
        # One by one: a sum over a dimension is made in an order that depends on the number of columns.
        columns_TW = terms_TKW[:, 0]
        for term_TW in terms_TKW.unbind(1)[1:]:
            columns_TW = columns_TW + term_TW
        return columns_TW.to(x_TE.dtype)

    def _runs(self, expert_TK: torch.Tensor) -> Iterator[tuple[FeedForward, int, int]]:
        """Each expert that has pairs, and which ones: `[start, stop)`."""
        start = 0
        counts = [int(count) for count in expert_TK.flatten().bincount(minlength=len(self.experts))]
        for expert, num_pairs in zip(self._each_expert(), counts, strict=True):
            if num_pairs > 0:
                yield expert, start, start + num_pairs
                start += num_pairs

    def _each_expert(self) -> list[FeedForward]:
        return [expert for expert in self.experts if isinstance(expert, FeedForward)]

    def sources(self) -> Sources:
        sources = dict(nested("router.", "gate.", self.router.sources()))
        for expert_index, expert in enumerate(self._each_expert()):
            sources |= nested(f"experts.{expert_index}.", f"experts.{expert_index}.", expert.sources())
        if self.shared is not None:
            sources |= nested("shared.", "shared_experts.", self.shared.sources())
        return sources
