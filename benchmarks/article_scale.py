"""The article's deployments on a virtual clock: its claims beside what the fleet simulation gives.

    PYTHONPATH=src python benchmarks/article_scale.py [--requests N] [--json FILE]

DeepSeek-R1 on nodes of eight H200, one prefill node to three decode nodes, with tensor parallel and with data parallel
attention, against the same four nodes colocated; and Qwen3-Coder-480B. The passes' times are those of
`pdserve.perfmodel.known`, whose provenance is printed. The load is 5,000 prompt and 320 output tokens, which fits the
article's rates; it names no lengths. The article's engine decodes with a multi-token prediction head and does not say
how often that is right. So each deployment is simulated twice: without, and with one draft a pass that is right 8 times
of 10. That is an assumption; DeepSeek reports 85 to 90% for the head of DeepSeek-V3 (arXiv 2412.19437, section 5.4.3).
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve.config.role import Role
from pdserve.perfmodel.hardware import hardware
from pdserve.perfmodel.known import known_model
from pdserve.perfmodel.model_shape import model_shape
from pdserve.perfmodel.placement import Placement
from pdserve.planner.candidate import Candidate, Pool
from pdserve.simulate.fleet.drafting import NO_DRAFTS, Drafting
from pdserve.simulate.fleet.simulation import simulate_fleet
from pdserve.workload.synthetic import SyntheticWorkload

PROMPT_TOKENS, OUTPUT_TOKENS = 5000, 320
CHUNK_TOKENS = 8192
"""Over the prompt: a prefill is one pass, and a colocated worker prefills first."""
ACCEPTANCE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    name: str
    claim: str
    """The article's, in short."""
    model: str
    pools: Mapping[Role, tuple[int, int, int]]
    """Nodes, tensor and data parallel size of each."""
    rate_per_s: float


DEPLOYMENTS = (
    Deployment(
        name="R1 colocated, 4 nodes of TP8",
        claim="could not hold 50 tokens/s a user",
        model="deepseek-r1",
        pools={Role.BOTH: (4, 8, 1)},
        rate_per_s=3.0,
    ),
    Deployment(
        name="R1 apart, 1 + 3 nodes of TP8",
        claim="over 90 tokens/s a user, about 1 request/s a decode node, about 100 ms more TTFT",
        model="deepseek-r1",
        pools={Role.PREFILL: (1, 8, 1), Role.DECODE: (3, 8, 1)},
        rate_per_s=3.0,
    ),
    Deployment(
        name="R1 apart, 3 nodes of TP8 + 1 node of DP8",
        claim="about 50 tokens/s a user at 1 request/s a rank",
        model="deepseek-r1",
        pools={Role.PREFILL: (3, 8, 1), Role.DECODE: (1, 1, 8)},
        rate_per_s=8.0,
    ),
    Deployment(
        name="Qwen3-Coder apart, 1 + 3 nodes of TP8",
        claim="about three decode nodes a prefill node",
        model="qwen3-coder-480b",
        pools={Role.PREFILL: (1, 8, 1), Role.DECODE: (3, 8, 1)},
        rate_per_s=3.0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    name: str
    claim: str
    provenance: str
    num_drafts: int
    acceptance: float
    rate_per_s: float
    tokens_per_s_a_user_p50: float
    tokens_per_s_a_user_p10: float
    """Nine of ten users get more."""
    ttft_s_p50: float
    ttft_s_p90: float
    worst_gap_s_p50: float
    exposed_s_p50: float | None
    utilisation: Mapping[str, float]
    num_refused: int


def candidate_of(deployment: Deployment) -> Candidate:
    shape, machine = model_shape(deployment.model), hardware("h200")
    return Candidate(
        pools=tuple(
            Pool(
                role=role,
                placement=Placement(
                    hardware=machine, shape=shape, tensor_parallel_size=tp_size, data_parallel_size=dp_size
                ),
                num_workers=num_nodes,
                chunk_tokens=CHUNK_TOKENS,
            )
            for role, (num_nodes, tp_size, dp_size) in deployment.pools.items()
        )
    )


def simulate(deployment: Deployment, drafting: Drafting, *, num_requests: int, seed: int) -> Finding:
    candidate = candidate_of(deployment)
    models = {pool.role: known_model(pool.placement) for pool in candidate.pools}
    load = SyntheticWorkload(
        num_prompt_tokens=PROMPT_TOKENS,
        num_output_tokens=OUTPUT_TOKENS,
        rate_per_s=deployment.rate_per_s,
        seed=seed,
    )
    result = simulate_fleet(candidate.fleet_plan(drafting), load.requests(num_requests), models)
    slow, typical = _percentiles(result.tpot_s, 90, 50)
    exposed_s = result.exposed_s[~np.isnan(result.exposed_s)]
    return Finding(
        name=deployment.name,
        claim=deployment.claim,
        provenance="; ".join(sorted({model.provenance for model in models.values()})),
        num_drafts=drafting.num_drafts,
        acceptance=drafting.acceptance,
        rate_per_s=deployment.rate_per_s,
        tokens_per_s_a_user_p50=1 / typical,
        tokens_per_s_a_user_p10=1 / slow,
        ttft_s_p50=_percentiles(result.ttft_s, 50)[0],
        ttft_s_p90=_percentiles(result.ttft_s, 90)[0],
        worst_gap_s_p50=_percentiles(result.worst_gap_s, 50)[0],
        exposed_s_p50=float(np.median(exposed_s)) if len(exposed_s) else None,
        utilisation={role.value: share for role, share in result.utilisation.items()},
        num_refused=result.num_refused,
    )


def _percentiles(values: NDArray[np.float64], *percentiles: int) -> list[float]:
    return [float(np.nanpercentile(values, percentile)) for percentile in percentiles]


def show(finding: Finding) -> None:
    busy = ", ".join(f"{role} {share:.0%}" for role, share in finding.utilisation.items())
    drafts = f", {finding.num_drafts} draft a pass, right {finding.acceptance:.0%} of the time: assumed"
    print(f"{finding.name}, {finding.rate_per_s:g} requests/s{drafts if finding.num_drafts else ''}")
    print(f"  the article  {finding.claim}")
    print(
        f"  simulated    {finding.tokens_per_s_a_user_p50:.0f} tokens/s a user (nine of ten over "
        f"{finding.tokens_per_s_a_user_p10:.0f}), TTFT {finding.ttft_s_p50:.2f} s (p90 {finding.ttft_s_p90:.2f}), "
        f"worst gap {finding.worst_gap_s_p50 * 1e3:.0f} ms; busy: {busy}"
    )
    if finding.exposed_s_p50 is not None:
        print(f"               {finding.exposed_s_p50 * 1e3:.2f} ms of a handoff after its prefill")
    print(f"  times        {finding.provenance}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the findings there too")
    arguments = parser.parse_args()
    findings: list[Finding] = []
    draftings = (NO_DRAFTS, Drafting(num_drafts=1, acceptance=ACCEPTANCE, seed=arguments.seed))
    for deployment, drafting in product(DEPLOYMENTS, draftings):
        findings.append(simulate(deployment, drafting, num_requests=arguments.requests, seed=arguments.seed))
        show(findings[-1])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
