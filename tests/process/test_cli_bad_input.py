"""What the operator asks wrongly: one clear line, exit status 2, before any process is started."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.process.commands_under_test import Command
from tests.process.gateway_under_test import gateway

from pdserve.cli.main import main

START_TIMEOUT_S = 60.0


def pdserve(*arguments: str, program: tuple[str, ...] = ("-m", "pdserve")) -> tuple[int, str]:
    """Exit status and the one line on standard error of a real command."""
    finished = subprocess.run(
        [sys.executable, *program, *arguments], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    (line,) = finished.stderr.splitlines()
    assert finished.stdout == ""
    return finished.returncode, line


@pytest.fixture
def taken_port() -> Generator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model directory with everything but weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve --decode 0", "no worker would decode"),
        ("serve --prefill -1", "must not be negative"),
        ("serve --kv-tokens 0", "--kv-tokens must be 1 or more, not 0"),
        ("serve --max-running 300", "--max-running 300 must be below --chunk-tokens 256"),
        ("serve --provider efa", "--provider efa can't be used: .*install the EFA driver"),
        ("serve --port 65536", "'65536' is no port number"),
        ("serve --drain-timeout -1", "'-1' is no time of 0 or more seconds"),
        ("serve --decode-dp 0", "--prefill-tp, --decode-tp and --decode-dp must be 1 or more"),
        ("serve --prefill-tp 2", "tensor parallel size 2 neither divides 3 KV heads nor is a multiple of them"),
        ("serve --decode-tp 6", "tensor parallel size 6 does not divide the model's 9 attention heads"),
        ("verify-handoff --decode-tp 2", "tensor parallel size 2 neither divides 3 KV heads"),
        ("worker --role prefill --join http://127.0.0.1:1 --data-parallel-size 2", "start several prefill workers"),
        (
            "worker --role decode --join http://127.0.0.1:1 --fabric-hosts 1.2.3.4,,",
            "is no list of different addresses",
        ),
        ("serve --frobnicate", "unrecognized arguments: --frobnicate"),
        ("serve --provider ucx", "invalid choice: 'ucx'"),
        ("serve --host 192.0.2.1", "can't listen on 192.0.2.1:8000"),
        ("serve /there/is/nothing", "/there/is/nothing is not a directory"),
        ("worker --role decode", "the following arguments are required: --join"),
        ("worker --role decode --join http://127.0.0.1:1 --page-slots 0", "--page-slots must be 1 or more"),
        ("worker --role decode --join http://127.0.0.1:1 --cpus 4096", "cores that this process may not use"),
        (
            "worker --role both --join http://127.0.0.1:1 --device cuda --capture-kv",
            "--capture-kv copies KV out of host",
        ),
        (
            "worker --role decode --join http://127.0.0.1:1 --device cuda",
            "--provider tcp can't be used: .*tcp can't write from or to GPU memory here; use verbs or efa",
        ),
        ("worker --role decode --join http://127.0.0.1:1 --provider efa", "can't be used: .*install the EFA driver"),
        ("worker --role decode --join 127.0.0.1:8000", "--join 127.0.0.1:8000 is no URL"),
        ("gateway --tls-cert a.pem", "together: add --tls-key and --tls-ca"),
        ("serve --tls-cert /no --tls-key /no --tls-ca /no", "--tls-cert /no can't be read: No such file"),
        ("gateway --control-port 8001", "--control-port is for control connections in TLS"),
        ("gateway --ssl-certfile a.pem", "takes --ssl-certfile and --ssl-keyfile together"),
        ("gateway --cpus 4096", "cores that this process may not use"),
        ("gateway --cpus first", "'first' is no list of cores"),
        ("gateway --port 65536", "'65536' is no port number"),
        ("trace hello", "say where the trace goes"),
    ],
)
def test_flag_that_makes_no_sense_is_one_line_and_status_2(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments.split())
    except SystemExit as by_argparse:
        status = by_argparse.code
    out, err = capsys.readouterr()
    *usage, line = err.splitlines()
    assert (status, out) == (2, "")
    assert not usage or usage[0].startswith("usage: "), err
    assert re.search(said, line), line


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_port_in_use_is_one_line_and_status_2(command: str, taken_port: str) -> None:
    status, line = pdserve(command, "--port", taken_port)
    assert status == 2
    assert line.startswith(f"pdserve {command}: can't listen on 127.0.0.1:{taken_port}: ") and "--port" in line


def test_model_without_weights_is_one_line_and_status_2(checkpoint: Path) -> None:
    assert pdserve("serve", str(checkpoint)) == (
        2,
        f"pdserve serve: {checkpoint} has no weights: no *.safetensors file in it",
    )


def test_model_without_config_is_one_line_and_status_2(tmp_path: Path) -> None:
    status, line = pdserve("serve", str(tmp_path))
    assert (status, line) == (
        2,
        f"pdserve serve: {tmp_path} has no config.json: it is not a Hugging Face model directory",
    )


def test_unknown_architecture_is_refused_with_the_known_ones(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    status, line = pdserve("serve", str(checkpoint))
    assert status == 2
    for name in ("MambaForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in line


def test_missing_libfabric_is_one_line_that_names_the_package() -> None:
    hidden = (
        "import sys; sys.modules['pdserve._fabric'] = None; "
        "from pdserve.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    status, line = pdserve("serve", program=("-c", hidden))
    assert status == 2
    assert "apt-get install libfabric-dev" in line


async def refused_worker(folder: Path, url: str, secret: str) -> str:
    """The one line of a worker that can't join."""
    arguments = ("worker", "--role", "decode", "--join", url, "--join-timeout", "1", "--kv-tokens", "512")
    command = await Command.start(folder, *arguments, environment={"PDSERVE_CLUSTER_SECRET": secret})
    try:
        assert await command.wait(timeout_s=START_TIMEOUT_S) == 2
        assert command.descendants() == []
    finally:
        await command.end()
    (line,) = command.stderr.splitlines()
    return line


async def test_worker_whose_gateway_is_not_there_gives_up_with_one_line(tmp_path: Path) -> None:
    line = await refused_worker(tmp_path, "http://127.0.0.1:1", "")
    assert line.startswith("pdserve worker: can't join the gateway at http://127.0.0.1:1: can't reach ")


async def test_worker_with_another_secret_or_model_is_refused_with_one_line(tmp_path: Path) -> None:
    async with gateway(cluster_secret="right") as running:
        line = await refused_worker(tmp_path, running.url, "wrong")
        assert line == f"pdserve worker: {running.url}/cluster refuses our cluster secret; both ends need the same one"
        line = await refused_worker(tmp_path, running.url, "right")
        assert line.endswith("the gateway serves model 'smol', the worker 'SmolLM2-135M-Instruct'")
