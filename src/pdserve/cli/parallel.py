"""The flags of a deployment's parallelism, for every command that starts one."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pdserve.config.deployment import WorkerPlace
from pdserve.engine.shape import require_ranks
from pdserve.model.config import read_config


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-tp", type=int, default=1, metavar="N", help="ranks of each prefill worker (default: 1)"
    )
    parser.add_argument(
        "--decode-tp", type=int, default=1, metavar="N", help="ranks that share a model on decode workers (default: 1)"
    )
    parser.add_argument(
        "--decode-dp", type=int, default=1, metavar="N", help="whole models in each decode worker (default: 1)"
    )


def require_parallel_model(model_dir: Path, places: Sequence[WorkerPlace]) -> None:
    """Raises: `ConfigError` when a worker has more or fewer ranks than can share the model's heads."""
    config = read_config(model_dir)
    for place in places:
        require_ranks(config, place.tensor_parallel_size)
