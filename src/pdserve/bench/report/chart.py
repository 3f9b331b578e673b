"""Line charts as SVG text, in the colors of the page's style sheet: it decides light or dark, not the chart.

Nothing is loaded from anywhere, and every text that comes from outside is escaped here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import assert_never

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 42, 44
"""Margins around the plotted area, for the numbers, labels and legend."""

MAX_POINTS = 600
"""Of a series: about one a pixel, so that a page of a million gaps stays small."""

Point = tuple[float, float]


class Mark(Enum):
    LINE = "line"
    STEP = "step"
    """The value holds until the next point."""
    DOTS = "dots"
    TICKS = "ticks"
    """Short strokes at the bottom: when something happened; the y values are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    label: str
    points: Sequence[Point]
    color: int
    """Which of the style sheet's: 0 to 4."""
    mark: Mark = Mark.LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A vertical line at a value that something should stay below."""

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    label: str
    start: float
    stop: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where the value lies between start and stop, as a share; what lies outside is put at the border."""
        if self.log:
            low, high = math.log(self.start), math.log(self.stop)
            share = (math.log(max(value, self.start)) - low) / (high - low)
        else:
            share = (value - self.start) / (self.stop - self.start)
        return min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        return _log_ticks(self.start, self.stop) if self.log else _linear_ticks(self.start, self.stop)


def axis_over(label: str, values: Sequence[float], *, log: bool = False) -> Axis:
    """An axis that shows all values; a linear one begins at 0."""
    positive = [value for value in values if value > 0]
    top = max(positive, default=1.0)
    if not log:
        return Axis(label=label, start=0.0, stop=top * 1.04)
    low = min(positive, default=top / 10)
    return Axis(label=label, start=low / 1.1, stop=max(top * 1.1, low * 2), log=True)


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, *, limits: Sequence[Limit] = ()) -> str:
    """A `figure` of fixed proportions. Series without points are left out, and so are limits outside the x axis."""
    drawn = [one for one in series if one.points]
    parts = [
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="14">{escape(title)}</text>',
        *_grid(x, y),
        *(_drawing(one, x, y) for one in drawn),
        *(_limit(limit, x) for limit in limits if x.start <= limit.x <= x.stop),
        *_legend(drawn),
        "</svg></figure>",
    ]
    return "\n".join(parts)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MAX_POINTS` of them, the first and the last among them."""
    if len(points) <= MAX_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[index * last // (MAX_POINTS - 1)] for index in range(MAX_POINTS)]


def short(value: float) -> str:
    """A number of a tick: at most four digits that count."""
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0e}"


def _across(x: Axis, value: float) -> float:
    return LEFT + x.place(value) * (WIDTH - LEFT - RIGHT)


def _down(y: Axis, value: float) -> float:
    return TOP + (1 - y.place(value)) * (HEIGHT - TOP - BOTTOM)


def _grid(x: Axis, y: Axis) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts: list[str] = []
    for tick in y.ticks():
        height = _down(y, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x.ticks():
        place = _across(x, tick)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{place:.1f}" y="{bottom + 15}" text-anchor="middle">{short(tick)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>'
        f'<text class="label" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{escape(y.label)}</text>"
    )
    return parts


def _drawing(series: Series, x: Axis, y: Axis) -> str:
    places = [(_across(x, across), _down(y, up)) for across, up in thinned(series.points)]
    color = f"c{series.color}"
    match series.mark:
        case Mark.LINE:
            path = "L".join(f"{across:.1f} {down:.1f}" for across, down in places)
            return f'<path class="line {color}" d="M{path}"/>'
        case Mark.STEP:
            (first_across, first_down), *rest = places
            path = "".join(f"H{across:.1f}V{down:.1f}" for across, down in rest)
            return f'<path class="line {color}" d="M{first_across:.1f} {first_down:.1f}{path}"/>'
        case Mark.DOTS:
            path = "".join(f"M{across:.1f} {down:.1f}h0" for across, down in places)
            return f'<path class="dots {color}" d="{path}"/>'
        case Mark.TICKS:
            path = "".join(f"M{across:.1f} {HEIGHT - BOTTOM}v-9" for across, _ in places)
            return f'<path class="line {color}" d="{path}"/>'
    assert_never(series.mark)


def _limit(limit: Limit, x: Axis) -> str:
    place = _across(x, limit.x)
    anchor, shift = ("end", -4) if x.place(limit.x) > 0.7 else ("start", 4)
    bottom, label = HEIGHT - BOTTOM, escape(limit.label)
    return (
        f'<line class="limit" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{place + shift:.1f}" y="{bottom - 8}" text-anchor="{anchor}">{label}</text>'
    )


def _legend(series: Sequence[Series]) -> list[str]:
    """In one row under the title; a chart of one series needs none."""
    if len(series) < 2:
        return []
    parts: list[str] = []
    place = LEFT
    for one in series:
        parts.append(f'<rect class="fill c{one.color}" x="{place}" y="23" width="10" height="8"/>')
        parts.append(f'<text class="tick" x="{place + 14}" y="31">{escape(one.label)}</text>')
        place += 30 + 6 * len(one.label)
    return parts


def _linear_ticks(start: float, stop: float) -> list[float]:
    """Five to nine multiples of 1, 2 or 5 times a power of ten."""
    rough = (stop - start) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.7 * rough)
    return [index * step for index in range(math.ceil(start / step), math.floor(stop / step) + 1)]


def _log_ticks(start: float, stop: float) -> list[float]:
    """1, 2 and 5 times powers of ten; the powers alone where those would crowd."""
    powers = range(math.floor(math.log10(start)), math.ceil(math.log10(stop)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if start <= tick <= stop]
