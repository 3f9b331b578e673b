"""Writes the tables of GPUs that come with pdserve, from the `gpu-tables` extra; run again when the package changes."""

import argparse
from datetime import UTC, datetime
from pathlib import Path

from pdserve.perfmodel.fit import MAX_MAPE
from pdserve.perfmodel.gpu_tables import tabulate
from pdserve.perfmodel.hardware import hardware
from pdserve.perfmodel.known import table_name
from pdserve.perfmodel.model_shape import model_shape
from pdserve.perfmodel.placement import Placement
from pdserve.perfmodel.profile import encode_profile

TABLES = Path(__file__).parents[1] / "src" / "pdserve" / "perfmodel" / "tables"
SHARDINGS = {
    "deepseek-r1": ((8, 1), (1, 8)),
    "qwen3-coder-480b": ((4, 1), (8, 1)),
    "llama-3.1-70b": ((2, 1), (4, 1), (8, 1)),
    "llama-3.1-8b": ((1, 1), (2, 1)),
}
"""Ranks of tensor parallelism, and of data parallelism."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--out", type=Path, default=TABLES, metavar="DIR")
    arguments = parser.parse_args()
    date = datetime.now(UTC).date().isoformat()
    for name, shardings in SHARDINGS.items():
        for tp, dp in shardings:
            placement = Placement(
                hardware=hardware(arguments.hardware),
                shape=model_shape(name),
                tensor_parallel_size=tp,
                data_parallel_size=dp,
            )
            profile = tabulate(placement, date=date)
            verdict = "ok" if profile.accuracy.worst() <= MAX_MAPE else "over the limit, not written"
            print(f"{placement}: held-out error at most {profile.accuracy.worst():.1%}, {verdict}")
            if profile.accuracy.worst() <= MAX_MAPE:
                (arguments.out / table_name(placement)).write_bytes(encode_profile(profile))


if __name__ == "__main__":
    main()
