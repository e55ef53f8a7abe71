"""The frontier of an order of service as a picture: loads a request against the longest waits."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, MARGIN = 640, 360, 56
COLOURS = ("#2f5fb3", "#8fb8f6", "#b98a1a", "#d6b25a")
STYLE = """<style>
  .line { fill: none; stroke-width: 2 } .text { fill: #1f2530 } .axis { stroke: #5b6472 }
  @media (prefers-color-scheme: dark) { .text { fill: #e8ebf0 } .axis { stroke: #9aa4b2 } }
</style>"""


class Point(NamedTuple):
    bound: str
    loads_a_request: float
    p99_s: float


def frontier(curves: Mapping[str, Sequence[Point]], what: str) -> str:
    """An SVG with a curve for each setting, and a dot for each bound on overtaking."""
    points = [point for curve in curves.values() for point in curve]
    most_loads = max(point.loads_a_request for point in points) * 1.05
    most_s = max(point.p99_s for point in points) * 1.02
    least_s = min(point.p99_s for point in points) * 0.9
    drawn = "".join(
        _curve(name, colour, number, [_at(point, most_loads, least_s, most_s) for point in curve])
        for number, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS, strict=False))
    )
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(what)}" font-family="system-ui, sans-serif" font-size="12">{STYLE}'
        f'<path class="line axis" d="M{MARGIN} 20V{bottom}H{right}"/>'
        f"{_text(right, bottom + 32, 'loads a request', 'end')}"
        f"{_text(MARGIN, 14, 'p99 of waiting')}"
        f"{_text(right, bottom + 16, f'{most_loads:.2f}', 'end')}"
        f"{_text(MARGIN - 4, 30, f'{most_s:.0f} s', 'end')}{_text(MARGIN, bottom + 16, '0')}"
        f"{_text(MARGIN - 4, bottom, f'{least_s:.0f} s', 'end')}{drawn}</svg>\n"
    )


def _at(point: Point, most_loads: float, least_s: float, most_s: float) -> tuple[float, float, str]:
    x = MARGIN + point.loads_a_request / most_loads * (WIDTH - 2 * MARGIN)
    y = HEIGHT - MARGIN - (point.p99_s - least_s) / (most_s - least_s) * (HEIGHT - MARGIN - 20)
    return round(x, 1), round(y, 1), point.bound


def _curve(name: str, colour: str, number: int, dots: list[tuple[float, float, str]]) -> str:
    path = "L".join(f"{x} {y}" for x, y, _ in dots)
    marks = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
        f"{'' if at % 2 else _text(x + 4, y - 5, bound)}"  # those of large bounds are close
        for at, (x, y, bound) in enumerate(dots)
    )
    y = 32 + 16 * number
    key = f'<circle cx="{MARGIN + 30}" cy="{y - 4}" r="4" fill="{colour}"/>'
    line = f'<path class="line" stroke="{colour}" d="M{path}"/>'
    return f"{line}{marks}{key}{_text(MARGIN + 40, y, name)}"


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text class="text" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
