"""The flags of speculative decoding, for every command that starts workers."""

import argparse
from collections.abc import Callable
from pathlib import Path

from pdserve.config.speculation import DEFAULT_NUM_DRAFT_TOKENS, NEEDS_MODEL_DIR, Drafter, Speculation
from pdserve.errors import ConfigError

KINDS = tuple(f"{drafter.value}:DIR" if drafter in NEEDS_MODEL_DIR else drafter.value for drafter in Drafter)


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculate",
        metavar="KIND",
        help="guess tokens ahead, for the same answers: ngram (what followed before), draft:DIR (a smaller model, "
        "named as the model is), mtp (the model's prediction module) or eagle:DIR (a head); the same on prefill and "
        "decode workers (default: none)",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help=f"most guesses in one pass of a sequence (default: {DEFAULT_NUM_DRAFT_TOKENS})",
    )


def drafter_dir(drafter: Drafter, named: str) -> Path:
    """Of a draft model, which is named as a model is, or of a head. Raises: `ConfigError` when it can't be had."""
    if drafter is Drafter.DRAFT_MODEL:
        from pdserve.model.source import resolve_model

        return resolve_model(named).dir
    directory = Path(named).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"--speculate {drafter.value}:{named}: {named} is not a directory")
    return directory.resolve()


def requested_speculation(
    arguments: argparse.Namespace, model_dir: Path, *, find: Callable[[Drafter, str], Path] = drafter_dir
) -> Speculation | None:
    """What the flags ask for; `find` is told the name of a drafter and gives its directory.

    Raises: `ConfigError` when they make no sense, or the drafter does not go with the model in `model_dir`.
    """
    if arguments.speculate is None:
        if arguments.num_draft_tokens is not None:
            raise ConfigError(f"--num-draft-tokens is for --speculate: give that too, such as --speculate {KINDS[0]}")
        return None
    drafter, named = _parse(arguments.speculate)
    speculation = Speculation(
        drafter=drafter,
        model_dir=None if named is None else str(find(drafter, named)),
        num_draft_tokens=(
            DEFAULT_NUM_DRAFT_TOKENS if arguments.num_draft_tokens is None else arguments.num_draft_tokens
        ),
    )
    _require_match(speculation, model_dir)
    return speculation


def speculation_flags(speculation: Speculation | None) -> tuple[str, ...]:
    """The flags of `add_speculation_flags`, spelled out for a child on this machine."""
    if speculation is None:
        return ()
    kind, directory = speculation.drafter.value, speculation.model_dir
    spelled = kind if directory is None else f"{kind}:{directory}"
    return ("--speculate", spelled, "--num-draft-tokens", str(speculation.num_draft_tokens))


def _parse(text: str) -> tuple[Drafter, str | None]:
    kind, colon, named = text.partition(":")
    try:
        drafter = Drafter(kind)
    except ValueError:
        raise ConfigError(f"--speculate {text} is none of {', '.join(KINDS)}") from None
    if drafter in NEEDS_MODEL_DIR and not named:
        raise ConfigError(f"--speculate {text} names no model: say which, as in {kind}:DIR")
    if drafter not in NEEDS_MODEL_DIR and colon:
        raise ConfigError(f"--speculate {kind} needs no model: leave :{named} out")
    return drafter, named or None


def _require_match(speculation: Speculation, model_dir: Path) -> None:
    """Raises: `ConfigError` when the drafter does not go with the model."""
    from pdserve.engine.draft_shape import draft_shape_of
    from pdserve.engine.port import EngineSpec
    from pdserve.model.config import read_config

    spec = EngineSpec(
        model_dir=str(model_dir), num_pages=1, page_slots=1, num_tail_slots=1, num_threads=1, speculation=speculation
    )
    draft_shape_of(read_config(model_dir), spec)
