"""Results of load runs that nobody ran: drawn from seeded distributions."""

import random

from pdserve.bench.load.result import Disturbance, LoadResult, SentRequest
from pdserve.bench.load.summary import summarise
from pdserve.bench.provenance import Machine
from pdserve.workload.objective import Objective

OBJECTIVE = Objective(ttft_s=0.5, tpot_s=0.06, stall_s=0.4)


def drawn_request(due_s: float, *, seed: int, slower: float = 1.0, num_output_tokens: int = 20) -> SentRequest:
    """Gaps of about 50 ms, times `slower`; one in ten is stalled for some hundred milliseconds."""
    draw = random.Random(f"{due_s}/{seed}")
    instants = [due_s + slower * draw.uniform(0.1, 0.6)]
    for _ in range(num_output_tokens - 1):
        stall = draw.uniform(0.1, 0.5) if draw.random() < 0.02 else 0.0
        instants.append(instants[-1] + slower * draw.uniform(0.03, 0.07) + stall)
    return SentRequest(
        due_s=due_s,
        sent_s=due_s + draw.uniform(0, 0.002),
        num_prompt_tokens=64,
        num_output_tokens=num_output_tokens,
        token_s=tuple(instants),
        ended_s=instants[-1] + 0.001,
        finish_reason="length",
        status=200,
    )


def refused_request(due_s: float, *, error: str = "server is full") -> SentRequest:
    return SentRequest(
        due_s=due_s,
        sent_s=due_s,
        num_prompt_tokens=64,
        num_output_tokens=20,
        ended_s=due_s + 0.01,
        status=503,
        error=error,
    )


def drawn_requests(num_requests: int, *, seed: int = 0, slower: float = 1.0) -> tuple[SentRequest, ...]:
    return tuple(drawn_request(0.5 * index, seed=seed, slower=slower) for index in range(num_requests))


def load_result(
    requests: tuple[SentRequest, ...],
    *,
    objective: Objective = OBJECTIVE,
    configuration: dict[str, str] | None = None,
    disturbance: Disturbance | None = None,
) -> LoadResult:
    return LoadResult(
        commit="0123456789ab",
        machine=Machine(cpu="a CPU", num_cpus=2, memory_bytes=2**34, kernel="6.1", python="3.11"),
        started="2026-11-30T00:00:00Z",
        configuration=configuration or {"url": "http://127.0.0.1:8000"},
        objective=objective,
        disturbance=disturbance or Disturbance(steal_share=0.0, psi_cpu_share=0.0),
        requests=requests,
        summary=summarise(requests, objective),
    )
