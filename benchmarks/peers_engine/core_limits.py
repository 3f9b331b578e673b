"""What the core can do at best, timed beside the engines: `core_limits.py MODEL_DIR CPU`.

Reads one JSON object a line, `{"phase": ..., "batch": B, "context": C, "steps": N}`, like `transformers_engine.py`, and
answers with `{"seconds": time}`: the greater of what torch's matrix products of this step's extents take, and of what
reading its weights and cached KV once takes at the bandwidth of a long sum.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.sched_setaffinity(0, {int(sys.argv[2])})

import torch  # noqa: E402  (after the pinning, which its threads inherit)

STREAM_FLOATS = 64 * 1024 * 1024


def best_seconds(run: Callable[[], object], *, repetitions: int) -> float:
    times: list[float] = []
    for _ in range(repetitions + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def product_extents(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(depth, columns) of the products of one layer."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    return [(hidden, (heads + 2 * kv_heads) * head_dim), (heads * head_dim, hidden), (hidden, 2 * ffn), (ffn, hidden)]


def product_seconds(config: dict[str, Any], num_rows: int, num_logit_rows: int, repetitions: int) -> float:
    """Weights that stay in the cache between calls, so a bound for what is computed, not for what is read."""
    seconds = 0.0
    extents = [(*pair, num_rows, config["num_hidden_layers"]) for pair in product_extents(config)]
    for depth, columns, rows, count in [*extents, (config["hidden_size"], config["vocab_size"], num_logit_rows, 1)]:
        x, weight = torch.randn(rows, depth), torch.randn(min(columns, 4096), depth)
        share = columns / len(weight)

        def run(x: torch.Tensor = x, weight: torch.Tensor = weight) -> object:
            return torch.nn.functional.linear(x, weight)

        seconds += count * share * best_seconds(run, repetitions=repetitions)
    return seconds


def read_seconds(config: dict[str, Any], model_bytes: int, num_cached: int, repetitions: int) -> float:
    stream = torch.ones(STREAM_FLOATS)
    seconds_per_byte = best_seconds(stream.sum, repetitions=repetitions) / (4 * STREAM_FLOATS)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 4
    return (model_bytes + num_cached * token_bytes) * seconds_per_byte


def main() -> None:
    torch.set_num_threads(1)
    model_dir = Path(sys.argv[1])
    config = json.loads((model_dir / "config.json").read_text())
    model_bytes = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    print(json.dumps({"ready": f"torch {torch.__version__}"}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            point = json.loads(line)
            is_prefill = point["phase"] == "prefill"
            num_rows = point["batch"] * (point["context"] if is_prefill else 1)
            num_cached = 0 if is_prefill else point["batch"] * point["context"]
            computed = product_seconds(config, num_rows, point["batch"], point["steps"])
            read = read_seconds(config, model_bytes, num_cached, point["steps"])
            print(json.dumps({"seconds": max(computed, read)}), flush=True)


if __name__ == "__main__":
    main()
