"""Draws the picture of `docs/soak.md` from a soak's document: `plot_soak.py [JSON]`; default: the committed one."""

# matplotlib's own annotations are partly unknown.
# pyright: reportUnknownMemberType=false

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
MIB = 1 << 20


def draw(result: dict[str, Any]) -> None:
    """Memory and descriptors of the processes that were judged, and used pages, over the run."""
    judged = {(growth["name"], growth["pid"]) for growth in result["growths"]}
    lives = [life for life in result["lives"] if (life["name"], life["pid"]) in judged]
    figure, (memory, descriptors, pages) = plt.subplots(3, 1, figsize=(11, 9), dpi=100, sharex=True)
    for life in lives:
        minutes = [at_s / 60 for at_s in life["at_s"]]
        own = [(rss - shared) / MIB for rss, shared in zip(life["rss_bytes"], life["shared_rss_bytes"], strict=True)]
        memory.plot(minutes, own, label=life["name"])
        descriptors.plot(minutes, life["num_fds"], label=life["name"])
    for ledger in result["ledgers"]:
        if any(ledger["num_used_pages"]):
            pages.plot([at_s / 60 for at_s in ledger["at_s"]], ledger["num_used_pages"], label=ledger["name"])
    for axes, noun in (
        (memory, "resident MiB, without the KV cache"),
        (descriptors, "open descriptors"),
        (pages, "pages in use"),
    ):
        axes.set_ylabel(noun)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for point in result["idle_points"]:
            axes.axvline(point["at_s"] / 60, color="#9e9e9e", linewidth=0.8, linestyle=":")
    pages.set_xlabel("minutes; dotted: all idle")
    figure.tight_layout()
    figure.savefig(DOCS / "soak.png")


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "results" / "soak.json"
    draw(json.loads(path.read_text()))
