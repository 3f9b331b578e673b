"""vLLM's engine alone, timed step by step, in its own environment: `vllm_steps.py MODEL_DIR CPU`.

Reads one JSON object a line, `{"phase": "prefill" | "decode", "batch": B, "context": C, "steps": N}`, and answers each
with `{"seconds": mean time of a step, "context": tokens before the step, on average}`. A prefill step is a prompt of C
tokens and the token after it. A decode step is one token for each of B sequences, which were given prompts of C tokens
before, untimed. They stay for the next line that asks for the same batch and context, and are longer then.

Everything runs in this process and its one thread: vLLM's processes of its own would wait for each other by spinning on
the core that they share.
"""

import importlib
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": sys.argv[2],
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "HF_HUB_OFFLINE": "1",
}
os.sched_setaffinity(0, {int(sys.argv[2])})

# What vLLM and its libraries print must not come between the answers.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

MAX_MODEL_LEN = 2048
NUM_WARM_UP_STEPS = 2
ORDINARY_TOKENS = range(1000, 5000)


class Engine:
    def __init__(self, model_dir: str) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        llm = self._vllm.LLM(
            model=model_dir,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
        )
        self._engine: Any = llm.llm_engine
        self._draw = random.Random(0)
        self._names = map(str, itertools.count())
        self._decoding: tuple[int, int] | None = None
        self._running: list[str] = []
        self._room = 0
        """Tokens that the longest of them may still get."""

    def measure(self, phase: str, batch: int, context: int, steps: int) -> dict[str, object]:
        if phase == "prefill":
            return {"seconds": self._prefill_seconds(context, steps), "context": context}
        if self._decoding != (batch, context) or self._room < steps:
            self._begin_decoding(batch, context)
        num_tokens_before = MAX_MODEL_LEN - self._room
        return {"seconds": self._decode_seconds(steps), "context": num_tokens_before + steps // 2}

    def _prefill_seconds(self, context: int, steps: int) -> float:
        self._stop_decoding()
        elapsed = 0.0
        for step in range(steps + 1):
            self._add(context, max_tokens=1)
            started = time.perf_counter()
            while self._engine.has_unfinished_requests():
                self._engine.step()
            # The first step warms up.
            elapsed += time.perf_counter() - started if step > 0 else 0.0
        return elapsed / steps

    def _begin_decoding(self, batch: int, context: int) -> None:
        self._stop_decoding()
        self._room = MAX_MODEL_LEN - context
        self._running = [self._add(context, max_tokens=self._room) for _ in range(batch)]
        self._decoding = (batch, context)
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step()}
            self._room -= len(begun) > 0
        for _ in range(NUM_WARM_UP_STEPS):
            self._engine.step()
        self._room -= NUM_WARM_UP_STEPS

    def _decode_seconds(self, steps: int) -> float:
        self._room -= steps
        started = time.perf_counter()
        num_tokens = sum(len(self._engine.step()) for _ in range(steps))
        seconds = time.perf_counter() - started
        if num_tokens != steps * len(self._running):
            raise SystemExit(f"{steps} steps of {len(self._running)} sequences gave {num_tokens} tokens")
        return seconds / steps

    def _stop_decoding(self) -> None:
        self._engine.abort_request(self._running, internal=False)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._running, self._decoding = [], None

    def _add(self, num_tokens: int, *, max_tokens: int) -> str:
        name = next(self._names)
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=self._only_new()
        )
        prompt = {"prompt_token_ids": self._draw.choices(ORDINARY_TOKENS, k=num_tokens)}
        self._engine.add_request(name, prompt, sampling)
        return name

    def _only_new(self) -> Any:
        """Outputs that hold the tokens of their step alone, as a server asks for them."""
        return importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA


def answer(values: dict[str, object]) -> None:
    print(json.dumps(values), file=ANSWERS, flush=True)


def main() -> None:
    engine = Engine(sys.argv[1])
    preloaded = " ".join(Path(each).name for each in os.environ["LD_PRELOAD"].split(":"))
    answer({"ready": f"vllm {importlib.import_module('vllm').__version__}", "configuration": f"with {preloaded}"})
    for line in sys.stdin:
        answer(engine.measure(**json.loads(line)))


if __name__ == "__main__":
    main()
