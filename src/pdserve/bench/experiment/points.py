"""Where the arms are compared, and what each arm is."""

from enum import Enum

import msgspec

from pdserve.config.deployment import DeploymentRequest, WorkerPlace, place_workers
from pdserve.errors import ConfigError
from pdserve.workload.objective import Objective
from pdserve.workload.synthetic import SyntheticWorkload

MAX_RUNNING = 48
"""Sequences in a pass, in every arm; below the smallest chunk, as the scheduler asks."""

WHOLE_PROMPT_TOKENS = 1024
"""Of a pass that is to take any prompt of the experiment whole, with a token of each running sequence."""

CHUNK_TOKENS = 64
"""From about as many rows on, a float32 GEMM on one core gains nothing from more: the finest cut that costs little."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A load, by the lengths of its requests and the utilisation that it gives to one prefill worker."""

    num_prompt_tokens: int
    num_output_tokens: int
    utilisation: float

    @property
    def name(self) -> str:
        return f"{self.num_prompt_tokens}/{self.num_output_tokens}@{self.utilisation:g}"

    def rate_per_s(self, prefill_s: float) -> float:
        """At which prompts that take `prefill_s` each keep a prefill worker busy for the share `utilisation`."""
        return self.utilisation / prefill_s

    def workload(self, *, prefill_s: float, seed: int) -> SyntheticWorkload:
        """The arrivals of a seed are alike at every rate, drawn out or pushed together."""
        return SyntheticWorkload(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            rate_per_s=self.rate_per_s(prefill_s),
            seed=seed,
        )


POINTS = (
    Point(num_prompt_tokens=256, num_output_tokens=64, utilisation=0.5),
    Point(num_prompt_tokens=512, num_output_tokens=64, utilisation=0.7),
    Point(num_prompt_tokens=512, num_output_tokens=128, utilisation=0.7),
    Point(num_prompt_tokens=256, num_output_tokens=128, utilisation=0.5),
    Point(num_prompt_tokens=64, num_output_tokens=64, utilisation=0.3),
)
"""A discrete-event model expects of disaggregation a clear win at the first three, then a tie, then a loss."""

NUM_HEADLINE_POINTS = 2


def points_named(names: str) -> tuple[Point, ...]:
    """`headline`, `all`, or names such as `256/64@0.5,64/64@0.3`. Raises: `ConfigError`."""
    if names == "all":
        return POINTS
    if names == "headline":
        return POINTS[:NUM_HEADLINE_POINTS]
    known = {point.name: point for point in POINTS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ConfigError(f"there is no point {unknown[0]!r}; choose headline, all or some of {', '.join(known)}")
    return tuple(known[name] for name in names.split(","))


class Arm(Enum):
    WHOLE = "A"
    """Two colocated workers. A pass takes a whole prompt as soon as it waits, and running sequences wait for it."""
    CHUNKED = "A'"
    """Two colocated workers that cut prompts into small chunks, mixed with the decodes."""
    APART = "B"
    """One prefill and one decode worker."""

    @property
    def chunk_tokens(self) -> int:
        return CHUNK_TOKENS if self is Arm.CHUNKED else WHOLE_PROMPT_TOKENS

    @property
    def worker_arguments(self) -> tuple[str, ...]:
        """Flags of `pdserve worker`: the arms differ in `--chunk-tokens` and in the roles, in nothing else."""
        return ("--chunk-tokens", str(self.chunk_tokens), "--max-running", str(MAX_RUNNING))

    def places(self, cpus: tuple[int, int]) -> tuple[WorkerPlace, ...]:
        """Two workers, each pinned to one of the cores, and so with one thread."""
        is_apart = self is Arm.APART
        request = DeploymentRequest(
            num_prefill=int(is_apart),
            num_decode=int(is_apart),
            num_colocated=0 if is_apart else 2,
            available_cpus=cpus,
        )
        return place_workers(request)


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must meet, given how long its prompt takes on an idle core."""

    ttft_prefills: float = 4.0
    """TTFT, in times of the prefill alone: what a queue of three prompts before it costs."""
    tpot_s: float = 0.1
    """As in the chat objectives of the literature on disaggregation: 10 tokens/s, faster than people read."""
    stall_s: float = 0.5
    """A pause of half a second in a running text is seen as a pause."""

    def objective(self, prefill_s: float) -> Objective:
        return Objective(ttft_s=self.ttft_prefills * prefill_s, tpot_s=self.tpot_s, stall_s=self.stall_s)
