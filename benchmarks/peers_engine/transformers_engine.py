"""`transformers` in float32, timed at the points of `pdserve bench-engine`: `transformers_engine.py MODEL_DIR CPU`.

Reads one JSON object a line, `{"phase": "prefill" | "decode", "batch": B, "context": C, "steps": N}`, and answers each
with `{"seconds": mean time of a step}`. A prefill step is a prompt of C tokens, a decode step one token for each of B
sequences with C cached tokens. The cache is random: what is in it changes no time.
"""

import json
import os
import sys
import time
from typing import Any

os.sched_setaffinity(0, {int(sys.argv[2])})

import torch  # noqa: E402  (after the pinning, which its threads inherit)
import transformers  # noqa: E402


def load() -> Any:
    torch.set_num_threads(1)
    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


def random_cache(model: Any, batch: int, context: int) -> Any:
    cache = transformers.DynamicCache()
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer_index in range(config.num_hidden_layers):
        keys = torch.randn(batch, config.num_key_value_heads, context, head_dim)
        cache.update(keys, torch.randn_like(keys), layer_index)
    return cache


def mean_seconds(model: Any, phase: str, batch: int, context: int, steps: int) -> float:
    num_tokens = context if phase == "prefill" else 1
    token_ids = torch.randint(model.config.vocab_size, (batch, num_tokens))
    cache = random_cache(model, batch, context) if phase == "decode" else None
    elapsed = 0.0
    for step in range(steps + 1):
        started = time.perf_counter()
        model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(dim=-1)
        # The first step warms up.
        elapsed += time.perf_counter() - started if step > 0 else 0.0
    return elapsed / steps


def main() -> None:
    model = load()
    print(json.dumps({"ready": f"transformers {transformers.__version__}"}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps({"seconds": mean_seconds(model, **json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
