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
    series = [
        ("pdserve", [row["tokens_per_s"] for row in rows], OURS),
        ("transformers", [row["transformers_tokens_per_s"] for row in rows], OTHER),
        ("limit of the core", [row["limit_tokens_per_s"] for row in rows], LIMIT),
    ]
    bars(axes, names, series)
    axes.set_ylabel("tokens/s, one core, float32")
    axes.legend()
    save(figure, "bench-engine.png")


def draw_transfer() -> None:
    rows = results("transfer")["rows"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), dpi=100, sharey=True)
    for axes, provider in zip(panels, ("tcp", "shm"), strict=True):
        chosen = [row for row in rows if row["provider"] == provider]
        names = [f"{row['page_bytes'] // 1024} KiB" for row in chosen]
        series = [
            (f"pdserve, {provider}", [row["gb_per_s"] for row in chosen], OURS),
            (chosen[0]["limit"], [row["limit_gb_per_s"] for row in chosen], LIMIT),
        ]
        bars(axes, names, series)
        axes.set_xlabel("page")
        axes.legend()
    panels[0].set_ylabel("GB/s, an immediate on each page")
    save(figure, "bench-transfer.png")


def draw_pushes() -> None:
    rows = results("transfer")["pushes"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), dpi=100, sharey=True)
    for axes, provider in zip(panels, ("tcp", "shm"), strict=True):
        chosen = [row for row in rows if row["provider"] == provider]
        names = [
            f"{row['cache']}\n{row['source_ranks']} to {row['target_ranks']}"
            + ("\n2 NICs" if row["num_nics"] == 2 else "")
            for row in chosen
        ]
        series = [
            (f"pdserve, {provider}", [row["gb_per_s"] for row in chosen], OURS),
            (chosen[0]["limit"], [row["limit_gb_per_s"] for row in chosen], LIMIT),
        ]
        bars(axes, names, series)
        axes.set_xlabel("ranks of the prefill and of the decode side")
        axes.legend()
    panels[0].set_ylabel("GB/s, pushes of one layer")
    panels[0].margins(y=0.25)  # room for the legends
    save(figure, "bench-pushes.png")


def draw_serving() -> None:
    rows = [row for row in results("serving")["latencies"] if row["noun"] == "ITL"]
    names = [row["arm"].replace(", ", "\n") for row in rows]
    figure, axes = plt.subplots(figsize=(11, 4.5), dpi=100)
    series = [
        ("p50", [1e3 * row["p50_s"] for row in rows], OURS),
        ("p99", [1e3 * row["p99_s"] for row in rows], OTHER),
    ]
    bars(axes, names, series)
    axes.set_ylabel("ms between two tokens of a stream")
    axes.legend()
    save(figure, "bench-serving.png")


def draw_decoding() -> None:
    rows = [row for row in results("decoding")["rows"] if row["load"] != "guided JSON"]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    figure, axes = plt.subplots(figsize=(11, 4.5), dpi=100)
    series = [
        (label, [row["tokens_per_s"] for row in rows if row["arm"] == arm], color)
        for arm, label, color in (("plain", "without guesses", OTHER), ("ngram", "--speculate ngram", OURS))
    ]
    bars(axes, [load.replace(", ", "\n") for load in loads], series)
    axes.set_ylabel("tokens/s of all streams, one core")
    axes.legend()
    save(figure, "bench-decoding.png")


def bars(axes: Axes, names: list[str], series: list[tuple[str, list[float], str]]) -> None:
    """For each name one bar a series (label, values, color), side by side."""
    width = 0.8 / len(series)
    for position, (label, values, color) in enumerate(series):
        offset = (position - (len(series) - 1) / 2) * width
        drawn = axes.bar([place + offset for place in range(len(names))], values, width, label=label, color=color)
        axes.bar_label(drawn, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(names)), names, fontsize=8)


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(DOCS / name)
    plt.close(figure)


if __name__ == "__main__":
    draw_engine()
    draw_transfer()
    draw_pushes()
    draw_serving()
    draw_decoding()
