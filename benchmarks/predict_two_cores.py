#!/usr/bin/env python3
"""What the fleet simulator says of the runs of `two_cores.py`, with the times of a profile of this machine.

Ends with status 1 when a figure is further off than `docs/fleet.md` allows, or two arms come in the wrong order.
"""

import argparse
import sys
from pathlib import Path

from pdserve.bench.experiment.book import load
from pdserve.bench.experiment.points import points_named
from pdserve.bench.experiment.prediction import is_right, prediction_table, predictions
from pdserve.errors import ConfigError
from pdserve.perfmodel.profile import read_profile

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--book", type=Path, default=RESULTS / "two_cores.json", metavar="FILE")
    parser.add_argument("--perf", type=Path, default=RESULTS / "profile.json", metavar="FILE")
    parser.add_argument("--points", default="all", help="headline, all, or names such as 256/64@0.5")
    arguments = parser.parse_args()
    try:
        perf = read_profile(arguments.perf).model
        found = predictions(load(arguments.book), points_named(arguments.points), perf)
    except ConfigError as error:
        print(f"predict_two_cores: {error.message}", file=sys.stderr)
        return 2
    print(prediction_table(found))
    return 0 if is_right(found) else 1


if __name__ == "__main__":
    sys.exit(main())
