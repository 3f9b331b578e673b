"""Draws the pictures of `docs/benchmarks.md` from the committed results: `plot_results.py`, without arguments."""

# matplotlib's own annotations are partly unknown.
# pyright: reportUnknownMemberType=false

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parents[1] / "docs"
OURS, OTHER, LIMIT = "#4c72b0", "#dd8452", "#9e9e9e"


def results(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def draw_engine() -> None:
    rows = results("engine")["rows"]
    names = [f"{row['phase']}\nbatch {row['batch']}, {row['context']}" for row in rows]
    figure, axes = plt.subplots(figsize=(11, 4.5), dpi=100)
    bars(axes, names, [row["tokens_per_s"] for row in rows], offset=-0.27, label="pdserve", color=OURS)
    peers = [row["transformers_tokens_per_s"] for row in rows]
    bars(axes, names, peers, offset=0.0, label="transformers", color=OTHER)
    limits = [row["limit_tokens_per_s"] for row in rows]
    bars(axes, names, limits, offset=0.27, label="limit of the core", color=LIMIT)
    axes.set_ylabel("tokens/s, one core, float32")
    axes.legend()
    save(figure, "bench-engine.png")


def draw_transfer() -> None:
    rows = results("transfer")["rows"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), dpi=100, sharey=True)
    for axes, provider in zip(panels, ("tcp", "shm"), strict=True):
        chosen = [row for row in rows if row["provider"] == provider]
        names = [f"{row['page_bytes'] // 1024} KiB" for row in chosen]
        bars(axes, names, [row["gb_per_s"] for row in chosen], offset=-0.2, label=f"pdserve, {provider}", color=OURS)
        limits = [row["limit_gb_per_s"] for row in chosen]
        bars(axes, names, limits, offset=0.2, label=chosen[0]["limit"], color=LIMIT)
        axes.set_xlabel("page")
        axes.legend()
    panels[0].set_ylabel("GB/s, an immediate on each page")
    save(figure, "bench-transfer.png")


def draw_serving() -> None:
    rows = [row for row in results("serving")["latencies"] if row["noun"] == "ITL"]
    names = [row["arm"].replace(", ", "\n") for row in rows]
    figure, axes = plt.subplots(figsize=(11, 4.5), dpi=100)
    bars(axes, names, [1e3 * row["p50_s"] for row in rows], offset=-0.2, label="p50", color=OURS)
    bars(axes, names, [1e3 * row["p99_s"] for row in rows], offset=0.2, label="p99", color=OTHER)
    axes.set_ylabel("ms between two tokens of a stream")
    axes.legend()
    save(figure, "bench-serving.png")


def bars(axes: Axes, names: list[str], values: list[float], *, offset: float, label: str, color: str) -> None:
    """One bar for each name, shifted by `offset` so that several series stand side by side."""
    places = [place + offset for place in range(len(names))]
    drawn = axes.bar(places, values, width=abs(offset) * 1.9 or 0.26, label=label, color=color)
    axes.bar_label(drawn, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(names)), names, fontsize=8)


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(DOCS / name)
    plt.close(figure)


if __name__ == "__main__":
    draw_engine()
    draw_transfer()
    draw_serving()
