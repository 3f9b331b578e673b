"""`pdserve simulate --workers`: what it prints, what it refuses, and its judgement of a run against a measured one."""

import re
import signal
from pathlib import Path

import msgspec
import pytest
from tests.pure.fleet_loads import apart, poisson, run

from pdserve.bench.load.result import Disturbance, LoadResult, SentRequest
from pdserve.bench.load.summary import summarise
from pdserve.bench.provenance import Machine
from pdserve.cli.main import main
from pdserve.cli.simulate_fleet import ASSUMED
from pdserve.cli.simulate_progress import FleetProgress, progress_line
from pdserve.simulate.fleet import world
from pdserve.simulate.fleet.result import FleetResult
from pdserve.workload.objective import Objective
from pdserve.workload.request import WorkloadRequest

OBJECTIVE = Objective(ttft_s=0.06, tpot_s=0.02)


def test_fleet_command_prints_what_clients_would_see(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workers", "4", "--requests", "30", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["ttft_s", "tpot_s", "worst_gap_s", "e2e_s", "exposed_s"]
    assert lines[-1].startswith("simulate: ok workers=4 requests=30 refused=0 wall_s=")
    assert any("assumed, not measured" in line for line in lines)


def test_fleet_command_that_is_interrupted_prints_what_has_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "EVENTS_A_LOOK", 300)
    goes_on = FleetProgress.goes_on

    def interrupt(progress: FleetProgress, num_ended: int) -> bool:
        if num_ended >= 5:
            signal.raise_signal(signal.SIGINT)
        return goes_on(progress, num_ended)

    monkeypatch.setattr(FleetProgress, "goes_on", interrupt)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["simulate", "--workers", "4", "--requests", "200"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["ttft_s", "tpot_s"]
    ended = re.match(r"simulate: interrupted workers=4 requests=(\d+) refused=0 ", lines[-1])
    assert ended is not None
    assert 5 <= int(ended[1]) < 200
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("num_ended", "elapsed_s", "left"), [(0, 5.0, "?"), (1, 1.0, "1:39"), (25, 30.0, "1:30"), (100, 9.0, "0:00")]
)
def test_progress_line_says_when_the_rest_will_have_ended(num_ended: int, elapsed_s: float, left: str) -> None:
    line = progress_line(num_ended, 100, elapsed_s=elapsed_s)
    assert line == f"pdserve: {num_ended} of 100 requests have ended, ETA {left}"


def test_fleet_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 40, "output_length": 3, "hash_ids": [1]}\n'
    trace.write_text("".join(row % (1000 * index) for index in range(6)))
    command = ["simulate", "--workers", "2", "--colocated", "--trace", f"mooncake:{trace}", "--requests", "5"]
    assert main(command) == 0
    assert "simulate: ok workers=2 requests=5 refused=0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--workers", "1"], "leave at least 1 for each role"),
        (["--workers", "9", "--prefill-share", "1.5"], "leave at least 1 for each role"),
        (["--prefill-workers", "1"], "go together"),
        (
            ["--prefill-workers", "1", "--decode-workers", "1", "--colocated"],
            "or --workers and how they are shared out",
        ),
        (["--workers", "2", "--colocated", "--prefill-share", "0.5"], "leave --prefill-share out"),
        (["--workers", "2", "--requests", "0"], "--requests must be 1 or more"),
        (["--workers", "2", "--rate", "0"], "must be over 0"),
        (["--workers", "2", "--workload", "poisson:rate=1"], "begins with synthetic:"),
        (["--workers", "2", "--trace", "nothing"], "is no FORMAT:FILE"),
        (["--workers", "2", "--trace", "azure:/nowhere"], "can't be read"),
        (["--workers", "2", "--perf", "/nowhere"], "can't be read"),
        (["--workers", "2", "--validate", "/nowhere", "--rate", "1"], "leave --rate and --requests out"),
    ],
)
def test_fleet_command_says_what_can_not_be(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def as_measured(load: list[WorkloadRequest], result: FleetResult, *, slowness: float) -> LoadResult:
    """A file of the load generator, as if a real fleet had done what the simulated one did, but slower."""
    sent = tuple(
        SentRequest(
            due_s=request.arrival_s,
            sent_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            token_s=tuple(
                request.arrival_s + slowness * (ttft_s + tpot_s * position)
                for position in range(request.num_output_tokens)
            ),
            finish_reason="length",
        )
        for request, ttft_s, tpot_s in zip(load, result.ttft_s.tolist(), result.tpot_s.tolist(), strict=True)
    )
    return LoadResult(
        commit=None,
        machine=Machine(cpu="none", num_cpus=1, memory_bytes=1, kernel="none", python="none"),
        started="2026-01-01T00:00:00+00:00",
        configuration={},
        objective=OBJECTIVE,
        summary=summarise(sent, OBJECTIVE),
        disturbance=Disturbance(steal_share=None, psi_cpu_share=None),
        requests=sent,
    )


@pytest.mark.parametrize(("slowness", "exit_status", "verdict"), [(1.0, 0, "ok"), (1.2, 1, "failed")])
def test_fleet_command_judges_itself_by_a_measured_run(
    slowness: float, exit_status: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = poisson(60, 20.0, num_prompt_tokens=300)
    measured = as_measured(load, run(apart(1, 2), load, ASSUMED), slowness=slowness)
    path = tmp_path / "result.json"
    path.write_bytes(msgspec.json.encode(measured))
    command = ["simulate", "--prefill-workers", "1", "--decode-workers", "2", "--validate", str(path)]
    assert main(command) == exit_status
    output = capsys.readouterr().out
    assert f"simulate: {verdict} workers=3 requests=60" in output
    assert ("off" in output) == (slowness > 1.0)
