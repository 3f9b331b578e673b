"""Prompts of a workload: as long as asked for, alike where their prefix blocks are, and nowhere else."""

import random
from collections.abc import Sequence

from pdserve.workload.request import WorkloadRequest


class Prompts:
    """The same seed and tokens give the same prompts. Requires: two different tokens at least."""

    def __init__(self, token_ids: Sequence[int], *, seed: int) -> None:
        """`token_ids` are what prompts are drawn from: those of a natural text, as often as they are in it."""
        self._token_ids = tuple(token_ids)
        self._seed = seed

    def prompt(self, index: int, request: WorkloadRequest) -> list[int]:
        """The tokens of the request at `index`: its blocks, each drawn by its name, and then some of its own."""
        tokens: list[int] = []
        for name in request.prefix_blocks:
            tokens += self._draw(f"block {name}", request.block_tokens)
        return tokens + self._draw(f"request {index}", request.num_prompt_tokens - len(tokens))

    def _draw(self, name: str, num_tokens: int) -> list[int]:
        # A string seeds by its SHA-512, so that neighbouring names have nothing in common.
        return random.Random(f"{self._seed} {name}").choices(self._token_ids, k=num_tokens)
