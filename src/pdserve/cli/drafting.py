"""`--speculate drafts=1,accept=0.8` of the commands that simulate: how the fleet's engines are taken to draft."""

import argparse
import math

from pdserve.errors import ConfigError
from pdserve.simulate.fleet.drafting import NO_DRAFTS, Drafting
from pdserve.workload.key_values import key_values

KEYS = ("drafts", "accept")
EXAMPLE = "drafts=1,accept=0.8"


def add_drafting_flag(parser: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage]
    parser.add_argument(
        "--speculate",
        metavar="drafts=K,accept=P",
        help="decode with K drafts a pass of a multi-token prediction head, each right with probability P where those "
        "before it were (default: none)",
    )


def requested_drafting(text: str | None, *, seed: int = 0) -> Drafting:
    """Raises: `ConfigError`."""
    if text is None:
        return NO_DRAFTS
    values = key_values(text, subject="--speculate", known=KEYS, needed=KEYS, example=EXAMPLE)
    if not (values["drafts"].isascii() and values["drafts"].isdigit()) or int(values["drafts"]) < 1:
        raise ConfigError(f"drafts={values['drafts']} of --speculate must be a whole number of 1 or more")
    return Drafting(num_drafts=int(values["drafts"]), acceptance=_share(values["accept"]), seed=seed)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"accept={text} of --speculate must be a probability of 0 to 1")
    return share
