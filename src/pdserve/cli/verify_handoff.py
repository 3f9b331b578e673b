"""`pdserve verify-handoff`: real workers hand over real prompts; bytes and tokens are compared with local ones."""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_check import (
    NATURAL_TEXT,
    NUM_TOKENS,
    Captured,
    Comparison,
    Guesses,
    Prober,
    compare,
    prompt_lengths,
)
from pdserve.cli.parallel import add_parallel_flags, require_parallel_model
from pdserve.cli.progress import say
from pdserve.cli.speculation import (
    add_speculation_flags,
    drafter_dir,
    requested_speculation,
    speculation_flags,
)
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.worker import add_engine_flags, engine_flags
from pdserve.config import environment
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.config.speculation import Drafter, Speculation
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment
from pdserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pdserve.model.source import ModelSource

NUM_LONG_TOKENS = 700


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "verify-handoff", help="compare handed over KV and tokens with local ones", allow_abbrev=False
    )
    parser.add_argument(
        "--model",
        help="directory or hub id, or tiny-deepseek, tiny-deepseek-mtp or tiny-qwen3-moe, made on the fly; default: "
        "the default model",
    )
    add_parallel_flags(parser)
    add_engine_flags(parser)
    add_speculation_flags(parser)
    parser.set_defaults(capture_kv=True)


def run(arguments: argparse.Namespace) -> int:
    source = _resolve(arguments.model)
    text_ids = Tokenizer.load(source.dir).encode(NATURAL_TEXT.read_text())
    is_sharded = max(arguments.prefill_tp, arguments.decode_tp, arguments.decode_dp) > 1
    lengths = prompt_lengths(
        page_slots=arguments.page_slots,
        num_long=min(NUM_LONG_TOKENS, len(text_ids)),
        # How chunks are cut and how heads are cut have nothing to do with each other.
        chunk_tokens=None if is_sharded else arguments.chunk_tokens,
    )
    prompts = [tuple(text_ids[:length]) for length in lengths]
    speculation = requested_speculation(arguments, source.dir, find=_find_drafter)
    apart, colocated = (
        _settings(arguments, source, speculation, request) for request in (_apart(arguments), _colocated(arguments))
    )
    for deployment in (apart, colocated):
        require_parallel_model(source.dir, deployment.places)
    handed_over, local = asyncio.run(_probe_both(apart, colocated, prompts))
    references = _transformers_tokens(source.dir, prompts)
    comparisons = [
        compare(len(prompt), remote, reference, by_transformers)
        for prompt, remote, reference, by_transformers in zip(
            prompts, handed_over.captured, local.captured, references, strict=True
        )
    ]
    guesses_are_ok = speculation is None or _report_guesses(speculation, handed_over.guesses, local.guesses)
    return _report(comparisons, guesses_are_ok=guesses_are_ok)


def _resolve(model: str | None) -> "ModelSource":
    from pdserve.bench.tiny_models import TINY_NAMES, prepare_tiny
    from pdserve.model.source import ModelSource, resolve_model

    if model in TINY_NAMES:
        return ModelSource(dir=prepare_tiny(model), name=model)
    return resolve_model(model)


def _find_drafter(drafter: Drafter, named: str) -> Path:
    from pdserve.bench.tiny_models import TINY_EAGLE, prepare_tiny_eagle

    if drafter is Drafter.EAGLE:
        return prepare_tiny_eagle() if named == TINY_EAGLE else drafter_dir(drafter, named)
    return _resolve(named).dir


def _apart(arguments: argparse.Namespace) -> DeploymentRequest:
    return DeploymentRequest(
        num_prefill=1,
        num_decode=1,
        num_colocated=0,
        available_cpus=_two_cpus(),
        prefill_tp=arguments.prefill_tp,
        decode_tp=arguments.decode_tp,
        decode_dp=arguments.decode_dp,
    )


def _colocated(arguments: argparse.Namespace) -> DeploymentRequest:
    """The reference, with as many ranks as the prefill worker."""
    return DeploymentRequest(
        num_prefill=0, num_decode=0, num_colocated=1, available_cpus=_two_cpus(), decode_tp=arguments.prefill_tp
    )


def _two_cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0))[:2])


def _settings(
    arguments: argparse.Namespace, source: "ModelSource", speculation: Speculation | None, request: DeploymentRequest
) -> DeploymentSettings:
    # One thread everywhere: on torch's kernels, how a product is split over threads decides its last bit.
    return DeploymentSettings(
        model_dir=str(source.dir),
        model_name=source.name,
        places=place_workers(request),
        worker_arguments=(*engine_flags(arguments), *speculation_flags(speculation), "--threads", "1"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probed:
    """What one deployment made of all prompts."""

    captured: list[Captured]
    guesses: Guesses


async def _probe_both(
    apart: DeploymentSettings, colocated: DeploymentSettings, prompts: list[tuple[int, ...]]
) -> tuple[_Probed, _Probed]:
    """Every prompt handed over, and computed locally; one deployment after the other."""
    async with _prober(apart) as prober:
        captured = [await prober.hand_over(prompt) for prompt in prompts]
        await prober.require_remote(num_local=sum(len(prompt) == 1 for prompt in prompts))
        await prober.require_shape(apart.places, captured)
        handed_over = _Probed(captured=captured, guesses=await prober.guesses())
    async with _prober(colocated) as prober:
        captured = [await prober.compute_locally(prompt) for prompt in prompts]
        await prober.require_shape(colocated.places, captured)
        local = _Probed(captured=captured, guesses=await prober.guesses())
    return handed_over, local


@asynccontextmanager
async def _prober(settings: DeploymentSettings) -> AsyncGenerator[Prober]:
    """Of a deployment that runs as long."""
    async with LocalDeployment(settings, on_progress=say) as deployment, aiohttp.ClientSession() as session:
        client = ApiClient(session, deployment.url, api_key=environment.api_key())
        yield Prober(client, session, secret=environment.cluster_secret())


def _transformers_tokens(model_dir: Path, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...] | None]:
    """Greedy tokens of `transformers` in float32, where it is installed."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        say("transformers is not installed: tokens are compared with the colocated worker alone")
        return [None] * len(prompts)
    model: Any = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportUnknownMemberType]
        model_dir, dtype=torch.float32
    )
    tokens: list[tuple[int, ...] | None] = []
    for prompt in prompts:
        prompt_ids = torch.tensor([prompt])
        output = model.generate(
            prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        tokens.append(tuple(output[0, len(prompt) :].tolist()))
    return tokens


def _report_guesses(speculation: Speculation, handed_over: Guesses, local: Guesses) -> bool:
    """Whether both guessed, and a drafter alike. N-grams may guess after a handoff one pass earlier."""
    print(f"guesses by {speculation.drafter.value}: handed over {handed_over}, colocated {local}")
    if speculation.needs_engine and handed_over != local:
        return False
    return min(handed_over.num_tried, local.num_tried) > 0


def _report(comparisons: list[Comparison], *, guesses_are_ok: bool) -> int:
    for comparison in comparisons:
        against_transformers = {True: "equal", False: "DIFFERENT", None: "not compared"}[comparison.equals_transformers]
        print(
            f"prompt_tokens={comparison.num_prompt_tokens} kv_bytes={comparison.kv_bytes} "
            f"mismatched_bytes={comparison.num_mismatched_bytes} "
            f"tokens: colocated {'equal' if comparison.equals_colocated else 'DIFFERENT'}, "
            f"transformers {against_transformers}"
        )
    is_ok = guesses_are_ok and all(comparison.is_ok for comparison in comparisons)
    num_mismatched = sum(comparison.num_mismatched_bytes for comparison in comparisons)
    print(
        f"verify-handoff: {'ok' if is_ok else 'FAILED'} prompts={len(comparisons)} "
        f"kv_bytes={sum(comparison.kv_bytes for comparison in comparisons)} mismatched_bytes={num_mismatched}"
    )
    sys.stdout.flush()
    return 0 if is_ok else 1
