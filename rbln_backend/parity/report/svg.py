"""A line chart with a logarithmic axis as SVG text: a report needs nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 40
_COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626")
_SMALLEST = 1e-9

Series = tuple[str, Sequence[float]]


def line_chart(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Lines over 0, 1, 2, ...; zeros and values that are not finite lie on the lower edge."""
    values = [value for _, line in series for value in line if _shown(value)]
    low = math.floor(math.log10(min(values, default=1e-6)))
    high = max(math.ceil(math.log10(max(values, default=1.0))), low + 1)
    chart = _Chart(low, high, max((len(line) for _, line in series), default=1))
    parts = [*chart.grid(), *chart.labels(x_label, y_label)]
    for index, (name, line) in enumerate(series):
        parts += chart.line(name, line, index)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _shown(value: float) -> bool:
    return math.isfinite(value) and value > _SMALLEST


class _Chart:
    def __init__(self, low: int, high: int, count: int) -> None:
        self._low, self._high, self._count = low, high, count

    def _x(self, index: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / max(self._count - 1, 1)

    def _y(self, value: float) -> float:
        power = math.log10(value) if _shown(value) else self._low
        share = (power - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(max(share, 0.0), 1.0)

    def grid(self) -> list[str]:
        parts = []
        for power in range(self._low, self._high + 1):
            y = self._y(10.0**power)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="y">1e{power}</text>')
        return parts

    def labels(self, x_label: str, y_label: str) -> list[str]:
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        last = (
            f'<text x="{self._x(self._count - 1):.1f}" y="{_HEIGHT - 22}">{self._count - 1}</text>'
        )
        return [
            f'<text x="{middle}" y="{_HEIGHT - 6}">{escape(x_label)}</text>',
            f'<text x="{_LEFT}" y="{_HEIGHT - 22}">0</text>{last}',
            f'<text x="12" y="12" class="title">{escape(y_label)}</text>',
        ]

    def line(self, name: str, values: Sequence[float], index: int) -> list[str]:
        color = _COLORS[index % len(_COLORS)]
        points = " ".join(f"{self._x(at):.1f},{self._y(v):.1f}" for at, v in enumerate(values))
        x = _WIDTH - _RIGHT - 4
        return [
            f'<polyline points="{points}" stroke="{color}"/>',
            # A style, because the page's own rule for text is stronger than an attribute.
            f'<text x="{x}" y="{_TOP + 14 * (index + 1)}" class="y" style="fill:{color}">'
            f"{escape(name)}</text>",
        ]
