"""`pdserve verify-handoff`: real workers hand over real prompts; bytes and tokens are compared with local ones."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_check import (
    NATURAL_TEXT,
    NUM_TOKENS,
    Captured,
    Comparison,
    Prober,
    compare,
    prompt_lengths,
)
from pdserve.cli.parallel import add_parallel_flags, require_parallel_model
from pdserve.cli.serve import say
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.worker import add_engine_flags, engine_flags
from pdserve.config import environment
from pdserve.config.deployment import DeploymentRequest, place_workers
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
        help="directory or hub id, or tiny-deepseek or tiny-qwen3-moe, made on the fly; default: the default model",
    )
    add_parallel_flags(parser)
    add_engine_flags(parser)
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
    settings = [_apart(arguments, source), _colocated(arguments, source)]
    for deployment in settings:
        require_parallel_model(source.dir, deployment.places)
    handed_over, local = asyncio.run(_probe(settings, prompts))
    references = _transformers_tokens(source.dir, prompts)
    comparisons = [
        compare(len(prompt), apart, colocated, reference)
        for prompt, apart, colocated, reference in zip(prompts, handed_over, local, references, strict=True)
    ]
    return _report(comparisons)


def _resolve(model: str | None) -> "ModelSource":
    from pdserve.bench.tiny_models import TINY_NAMES, prepare_tiny
    from pdserve.model.source import ModelSource, resolve_model

    if model in TINY_NAMES:
        return ModelSource(dir=prepare_tiny(model), name=model)
    return resolve_model(model)


def _apart(arguments: argparse.Namespace, source: "ModelSource") -> DeploymentSettings:
    request = DeploymentRequest(
        num_prefill=1,
        num_decode=1,
        num_colocated=0,
        available_cpus=_two_cpus(),
        prefill_tp=arguments.prefill_tp,
        decode_tp=arguments.decode_tp,
        decode_dp=arguments.decode_dp,
    )
    return _settings(arguments, source, request)


def _colocated(arguments: argparse.Namespace, source: "ModelSource") -> DeploymentSettings:
    """The reference, with as many ranks as the prefill worker."""
    request = DeploymentRequest(
        num_prefill=0, num_decode=0, num_colocated=1, available_cpus=_two_cpus(), decode_tp=arguments.prefill_tp
    )
    return _settings(arguments, source, request)


def _two_cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0))[:2])


def _settings(arguments: argparse.Namespace, source: "ModelSource", request: DeploymentRequest) -> DeploymentSettings:
    # One thread everywhere: on torch's kernels, how a product is split over threads decides its last bit.
    return DeploymentSettings(
        model_dir=str(source.dir),
        model_name=source.name,
        places=place_workers(request),
        worker_arguments=(*engine_flags(arguments), "--threads", "1"),
    )


async def _probe(
    settings: list[DeploymentSettings], prompts: list[tuple[int, ...]]
) -> tuple[list[Captured], list[Captured]]:
    """Every prompt handed over, and computed locally; one deployment after the other."""
    apart, colocated = settings
    secret = environment.cluster_secret()
    async with LocalDeployment(apart, on_progress=say) as deployment, aiohttp.ClientSession() as session:
        prober = Prober(ApiClient(session, deployment.url, api_key=environment.api_key()), session, secret=secret)
        handed_over = [await prober.hand_over(prompt) for prompt in prompts]
        await prober.require_remote(num_local=sum(len(prompt) == 1 for prompt in prompts))
        await prober.require_shape(apart.places, handed_over)
    async with LocalDeployment(colocated, on_progress=say) as deployment, aiohttp.ClientSession() as session:
        prober = Prober(ApiClient(session, deployment.url, api_key=environment.api_key()), session, secret=secret)
        local = [await prober.compute_locally(prompt) for prompt in prompts]
        await prober.require_shape(colocated.places, local)
    return handed_over, local


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


def _report(comparisons: list[Comparison]) -> int:
    for comparison in comparisons:
        against_transformers = {True: "equal", False: "DIFFERENT", None: "not compared"}[comparison.equals_transformers]
        print(
            f"prompt_tokens={comparison.num_prompt_tokens} kv_bytes={comparison.kv_bytes} "
            f"mismatched_bytes={comparison.num_mismatched_bytes} "
            f"tokens: colocated {'equal' if comparison.equals_colocated else 'DIFFERENT'}, "
            f"transformers {against_transformers}"
        )
    is_ok = all(comparison.is_ok for comparison in comparisons)
    num_mismatched = sum(comparison.num_mismatched_bytes for comparison in comparisons)
    print(
        f"verify-handoff: {'ok' if is_ok else 'FAILED'} prompts={len(comparisons)} "
        f"kv_bytes={sum(comparison.kv_bytes for comparison in comparisons)} mismatched_bytes={num_mismatched}"
    )
    sys.stdout.flush()
    return 0 if is_ok else 1
