"""The few lines that a terminal gets of a run."""

from pdserve.bench.load.capacity import Capacity
from pdserve.bench.load.result import Disturbance, LoadResult, SentRequest
from pdserve.bench.load.summary import summarise
from pdserve.bench.load.table import MAX_ERROR_LENGTH, capacity_lines, summary_lines
from pdserve.bench.provenance import Machine
from pdserve.workload.objective import Objective


def result(requests: list[SentRequest], objective: Objective) -> LoadResult:
    return LoadResult(
        commit=None,
        machine=Machine(cpu="c", num_cpus=2, memory_bytes=1, kernel="k", python="3"),
        started="2026-01-01T00:00:00+00:00",
        configuration={},
        objective=objective,
        summary=summarise(requests, objective),
        disturbance=Disturbance(steal_share=0.015, psi_cpu_share=None),
        pools={"decode": 0.5, "prefill": 0.25},
        handoff={"num_traced": 2.0, "exposed_s_p50": 0.0015, "hidden_share_mean": 0.975},
        requests=tuple(requests),
    )


def answered(*token_s: float) -> SentRequest:
    return SentRequest(
        due_s=0.0,
        sent_s=0.0,
        num_prompt_tokens=1,
        num_output_tokens=len(token_s),
        token_s=token_s,
        ended_s=token_s[-1],
        finish_reason="length",
        status=200,
    )


def failed(error: str) -> SentRequest:
    return SentRequest(
        due_s=0.0, sent_s=0.0, num_prompt_tokens=1, num_output_tokens=1, ended_s=1.0, status=502, error=error
    )


def test_lines_of_a_run_tell_latencies_outcome_and_surroundings() -> None:
    lines = summary_lines(result([answered(1.0, 2.0), failed("no")], Objective(ttft_s=1.0)))
    assert lines[1].split() == ["TTFT", *["1.0000"] * 5, "1"]
    assert lines[-6:] == [
        "requests 2: completed 1, refused 0, failed 1; 0.5 requests/s and 1 tokens/s over 2.0 s",
        "objective met by 50.0%: 0.5 good requests/s",
        "busy: decode 50%, prefill 25%",
        "handoffs traced 2: exposed 1.50 ms in the median, 97.5% of the KV bytes hidden",
        "machine: steal 1.5%",
        "1 failed: no",
    ]


def test_lines_of_errors_are_counted_and_each_is_one_short_line() -> None:
    page = "<html>\n<body>" + "bad gateway " * 100
    lines = summary_lines(result([failed(page), failed(page), failed("no")], Objective()))
    assert lines[-1] == "1 failed: no"
    assert lines[-2].startswith("2 failed: <html> <body>bad gateway ")
    assert len(lines[-2]) <= len("2 failed: ") + MAX_ERROR_LENGTH


def test_lines_of_a_capacity_say_between_which_rates_it_lies() -> None:
    assert capacity_lines(Capacity(rate_per_s=1.5, too_much_per_s=1.6, steps=())) == [
        "capacity: 1.5 requests/s, the largest rate tried at which 90% of the requests met the objective, "
        "and at 1.6 not"
    ]
    assert capacity_lines(Capacity(rate_per_s=None, too_much_per_s=1.6, steps=())) == [
        "capacity: at no rate tried 90% of the requests met the objective"
    ]
