"""`pdserve bench` as an operator runs it, against one prefill and one decode worker, and what it says when it can't."""

import json
import re
import signal
from pathlib import Path

import msgspec
import pytest
from tests.process.commands_under_test import Command
from tests.process.deployment_under_test import API_KEY, SECRET, Running
from tests.process.gateway_under_test import until
from tests.process.openai_server import other_server

from pdserve.bench.load.capacity import MAX_STEPS, Capacity
from pdserve.bench.load.result import LoadResult
from pdserve.cli.main import main

TIMEOUT_S = 60.0
TRACE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 100, "input_length": 200, "output_length": 7, "hash_ids": [3]}
"""


async def bench(folder: Path, running: Running, *arguments: str) -> tuple[int, Command]:
    command = await Command.start(
        folder,
        *("bench", "--url", running.url, "--out", str(folder), *arguments),
        environment={"PDSERVE_API_KEY": API_KEY, "PDSERVE_CLUSTER_SECRET": SECRET},
    )
    try:
        return await command.wait(timeout_s=TIMEOUT_S), command
    finally:
        await command.end()


@pytest.mark.asyncio(loop_scope="session")
async def test_bench_of_a_mooncake_trace_writes_result_and_report(apart: Running, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    status, command = await bench(
        tmp_path,
        apart,
        *("--trace", f"mooncake:{trace}", "--scale-length", "0.05", "--stretch", "0.1", "--slo", "ttft=60,tpot=60"),
    )
    assert status == 0, command.stderr
    result = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=LoadResult)
    summary = result.summary
    assert (summary.num_requests, summary.num_completed, summary.attainment) == (3, 3, 1.0), command.stdout
    lengths = {(request.num_prompt_tokens, len(request.token_s)) for request in result.requests}
    assert lengths == {(52 + 4, 3), (52, 1), (10, 1)}
    assert result.pools.keys() == {"prefill", "decode"}
    assert all(0 < share <= 1 for share in result.pools.values())
    assert result.handoff["num_traced"] >= 1
    assert 0 < result.handoff["hidden_share_mean"] <= 1
    assert result.configuration["trace"].startswith("each arrival at random")
    assert result.configuration["prompt tokens"] == "of a natural text, shuffled"
    report = (tmp_path / "report.html").read_text()
    assert "Load report" in report and "One handoff" in report
    assert re.search(r"^objective met by 100.0%", command.stdout, re.MULTILINE)


@pytest.mark.asyncio(loop_scope="session")
async def test_bench_for_a_model_that_is_not_served_is_one_line_and_status_2(apart: Running, tmp_path: Path) -> None:
    load = ("--workload", "synthetic:prompt=8,output=2,rate=1")
    status, command = await bench(tmp_path, apart, *load, "--model", "gpt-9")
    (line,) = command.stderr.splitlines()
    assert (status, command.stdout) == (2, "")
    assert line.startswith(f"pdserve bench: {apart.url} does not serve 'gpt-9'; it serves: ")
    assert not (tmp_path / "result.json").exists()


async def test_bench_that_is_interrupted_keeps_what_came(tmp_path: Path) -> None:
    async with other_server() as server:
        server.silent = {8}
        load = ("--workload", "synthetic:prompt=8,output=4,rate=1000,cv=0")
        command = await Command.start(tmp_path, *("bench", "--url", server.url, "--out", str(tmp_path), *load))

        async def num_asked() -> int:
            return len(server.bodies)

        try:
            await until(num_asked, bool, timeout_s=TIMEOUT_S)
            command.process.send_signal(signal.SIGINT)
            assert await command.wait(timeout_s=TIMEOUT_S) == 130, command.stderr
        finally:
            await command.end()
    result = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=LoadResult)
    assert result.summary.num_completed == 0
    assert any(request.ended_s is None for request in result.requests)
    assert result.configuration["cut short"].endswith("of 100 requests")
    assert (tmp_path / "report.html").exists()


async def test_bench_for_a_capacity_beyond_what_it_tries_says_so(tmp_path: Path) -> None:
    async with other_server() as server:
        load = (
            "--workload",
            "synthetic:prompt=8,output=4,rate=100",
            "--requests",
            "4",
            "--slo",
            "ttft=30",
            "--capacity",
        )
        command = await Command.start(tmp_path, *("bench", "--url", server.url, "--out", str(tmp_path), *load))
        try:
            assert await command.wait(timeout_s=TIMEOUT_S) == 0, command.stderr
        finally:
            await command.end()
        prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == 4 * MAX_STEPS, "each rate is tried with prompts of its own"
    capacity = msgspec.json.decode((tmp_path / "capacity.json").read_bytes(), type=Capacity)
    assert (len(capacity.steps), capacity.too_much_per_s) == (MAX_STEPS, None)
    result = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=LoadResult)
    assert result.configuration["rate"] == f"{capacity.rate_per_s:.4g} requests/s"


SYNTHETIC = "--workload synthetic:prompt=8,output=2,rate=1"
NOWHERE = "--url http://127.0.0.1:1 --out {folder}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "say where the load goes: --url"),
        (f"--url 127.0.0.1:1 --out {{folder}} {SYNTHETIC}", "is no URL"),
        (f"--url http://127.0.0.1:1 {SYNTHETIC}", "--out DIR"),
        (f"{NOWHERE} {SYNTHETIC}", "can't reach http://127.0.0.1:1: "),
        (NOWHERE, "say which load: "),
        (f"{NOWHERE} {SYNTHETIC} --trace azure:x", "say which load: "),
        (f"{NOWHERE} --workload chats:prompt=8", "it begins with synthetic:"),
        (
            f"{NOWHERE} --workload synthetic:prompt=8,output=2,rate=1,burst=2",
            "'burst=2' is no part of a synthetic workload; it knows prompt",
        ),
        (f"{NOWHERE} --trace sharegpt:x", "the formats are mooncake, azure, burstgpt"),
        (f"{NOWHERE} --trace azure:{{folder}}/none.csv", "can't be read: No such file or directory"),
        (f"{NOWHERE} --trace azure:{{folder}}/bad.csv", "line 2 of the azure trace: 2 cells under a header of 3"),
        (f"{NOWHERE} --trace azure:{{folder}}/latin.csv", "it is no UTF-8 text"),
        (f"{NOWHERE} {SYNTHETIC} --slo ttft=0", "an objective of ttft=0 can't be met"),
        (f"{NOWHERE} {SYNTHETIC} --capacity", "--capacity needs an objective"),
        (f"{NOWHERE} {SYNTHETIC} --requests 0", "--requests must be 1 or more"),
        (
            f"{NOWHERE} {SYNTHETIC} --requests 1 --capacity --slo ttft=1",
            "--capacity needs requests that come at different",
        ),
        (f"{NOWHERE} {SYNTHETIC} --seed -1", "--seed must be 0 or more"),
        (f"{NOWHERE} {SYNTHETIC} --stretch 0", "--stretch must be a factor over 0"),
        (f"{NOWHERE} {SYNTHETIC} --scale-length nan", "--scale-length must be a factor over 0"),
        (f"{NOWHERE} {SYNTHETIC} --deadline 0", "--deadline must be seconds, over 0"),
        (f"{NOWHERE} {SYNTHETIC} --max-in-flight 0", "--max-in-flight must be 1 or more"),
    ],
)
def test_bench_asked_for_what_makes_no_sense_is_one_line_and_status_2(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n")
    (tmp_path / "latin.csv").write_bytes("Größe".encode("latin-1"))
    status = main(["bench", *arguments.format(folder=tmp_path).split()])
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (status, out) == (2, "")
    assert said in line, line


def test_bench_that_can_not_write_its_result_says_so_before_it_sends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(json.dumps("not a folder"))
    status = main(["bench", *f"--url http://127.0.0.1:1 --out {tmp_path}/file/out {SYNTHETIC}".split()])
    assert status == 2
    assert "can't be made: Not a directory" in capsys.readouterr().err
