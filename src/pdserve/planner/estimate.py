"""What a pool can bear, without simulating it: queueing theory over the performance model.

Good enough to leave out what can't do; what is left is simulated.
"""

import math
from dataclasses import dataclass

from pdserve.perfmodel.fitted import FittedModel
from pdserve.perfmodel.placement import Placement
from pdserve.perfmodel.port import PassShape
from pdserve.perfmodel.sample import chunk_shape, mixed_shape
from pdserve.planner.goal import Goal
from pdserve.units import div_ceil

BISECTIONS = 40
SPREAD = 1.3
"""Standard deviations above the mean that a decode batch of Poisson arrivals is below in nine of ten passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Of workers that are all alike. Rates are requests a second of one data-parallel rank."""

    goal: Goal
    placement: Placement
    model: FittedModel

    def prefill_s(self, chunk_tokens: int) -> float:
        """Of a prompt of mean length alone, its passes without decode tokens."""
        return self._passes_s(self.goal.num_uncached_tokens, chunk_tokens)

    def step_s(self, batch: int) -> float:
        """Of a decode pass."""
        return self._pass_s(self._decode(batch))

    def token_s(self, batch: int) -> float:
        """From token to token in the mean."""
        return self.step_s(batch) / self.goal.drafting.tokens_per_pass

    def idle_ttft_s(self, chunk_tokens: int) -> float:
        """In an empty fleet, of a late prompt: its prefill, the push of what its last layer left over, and the first
        decode pass."""
        return self._passes_s(self.goal.num_late_tokens, chunk_tokens) + self._exposed_s() + self.step_s(1)

    def prefill_ttft_s(self, rate: float, *, num_workers: int, chunk_tokens: int) -> float:
        """That nine of ten requests keep within, when `rate` is that of the whole pool; infinite when overloaded.

        Source: the wait in M/G/c, by Sakasegawa's approximation, prefills varying as the prompts' lengths; its tail
        taken as exponential.
        """
        service_s = self.prefill_s(chunk_tokens)
        load = rate * service_s / num_workers
        if load >= 1:
            return math.inf
        busy_s = service_s * (1 + self.goal.workload.prompt_cv**2) / 2
        mean_wait_s = busy_s * load ** (math.sqrt(2 * (num_workers + 1)) - 1) / (num_workers * (1 - load))
        wait_share = min(1.0, load ** math.sqrt(num_workers))
        late_wait_s = mean_wait_s / wait_share * max(0.0, math.log(10 * wait_share)) if wait_share > 0 else 0.0
        return late_wait_s + self.idle_ttft_s(chunk_tokens)

    def decode_rate(self) -> float:
        """The most of one rank that keeps the time per token, a batch above the mean included; 0 when none does."""
        most = self._most_batch()
        if not most:
            return 0.0
        mean = (math.sqrt(SPREAD**2 + 4 * most) - SPREAD) ** 2 / 4
        token_s = self.token_s(max(1, math.floor(mean)))
        return mean / (token_s * self.goal.workload.num_output_tokens)

    def colocated_rate(self, chunk_tokens: int) -> float:
        """The most of one rank that keeps both targets, with prompts cut into chunks that ride in decode passes."""
        low, high = 0.0, 1 / self.prefill_s(chunk_tokens)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self._colocated_holds(middle, chunk_tokens):
                low = middle
            else:
                high = middle
        return low

    def _colocated_holds(self, rate: float, chunk_tokens: int) -> bool:
        """Little's law at the target: the batch that the time per token leads to, and the share of mixed passes."""
        goal, chunks = self.goal, self._chunks(self.goal.num_uncached_tokens, chunk_tokens)
        mean = rate * goal.workload.num_output_tokens * goal.tpot_s
        batch = max(1, math.ceil(mean + SPREAD * math.sqrt(mean)))
        if batch * goal.num_final_tokens > self.placement.kv_tokens:
            return False
        mixed = [self._mixed(chunk, batch, chunk_tokens=chunk_tokens) for chunk in chunks]
        mixed_s = [pass_s for pass_s, _ in mixed]
        mixed_share = rate * sum(mixed_s)
        if mixed_share >= 1:
            return False
        tokens_a_s = rate * sum(num_tokens for _, num_tokens in mixed) + (1 - mixed_share) / self.token_s(batch)
        wait_s = sum(mixed_s) / 2 * mixed_share / (1 - mixed_share)
        return 1 / tokens_a_s <= goal.tpot_s and math.log(10) * wait_s + sum(mixed_s) <= goal.ttft_s

    def _mixed(self, chunk: PassShape, batch: int, *, chunk_tokens: int) -> tuple[float, float]:
        """Time of a pass that the chunk and the batch share, and the tokens that each of the batch gets of it: more
        than one where the chunk leaves room for drafts."""
        drafting, decode = self.goal.drafting, self._decode(batch)
        if chunk.num_prefill_tokens + decode.num_decode_tokens <= chunk_tokens:
            return self._pass_s(mixed_shape(chunk, decode)), drafting.tokens_per_pass
        return self._pass_s(mixed_shape(chunk, self._decode(batch, num_tried=1))), 1.0

    def _most_batch(self) -> int:
        """The largest that keeps the time per token and fits into the cache."""
        low, high = 0, self.placement.kv_tokens // self.goal.num_final_tokens
        while low < high:
            middle = div_ceil(low + high, 2)
            if self.token_s(middle) <= self.goal.tpot_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _passes_s(self, num_tokens: int, chunk_tokens: int) -> float:
        return sum(self._pass_s(shape) for shape in self._chunks(num_tokens, chunk_tokens))

    def _chunks(self, num_tokens: int, chunk_tokens: int) -> list[PassShape]:
        """Of a prompt with so many tokens that are in no cache."""
        start = self.goal.num_cached_tokens
        stop = start + num_tokens
        starts = range(start, stop, chunk_tokens)
        return [chunk_shape(start=start, stop=min(start + chunk_tokens, stop)) for start in starts]

    def _decode(self, batch: int, *, num_tried: int | None = None) -> PassShape:
        """With all drafts, where it is not said how many tokens of a sequence are tried."""
        num_tokens = batch * (self.goal.drafting.num_tried if num_tried is None else num_tried)
        return PassShape(num_decode_tokens=num_tokens, num_decode_keys=num_tokens * self.goal.mean_keys)

    def _pass_s(self, shape: PassShape) -> float:
        return self.goal.drafting.pass_s(self.model, shape, num_layers=self.placement.shape.num_layers)

    def _exposed_s(self) -> float:
        """Of the push: its last layer's part, when the layers before it were hidden behind the forward pass."""
        shape = self.placement.shape
        num_bytes = self.goal.num_late_tokens * shape.kv_rank_token_bytes(self.placement.tensor_parallel_size)
        return self.model.push_s(num_bytes // shape.num_layers)
