"""A picture of a study as SVG: how often each size ran, with the present and the new buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import Change
from server.tuning.study import Study

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 760, 200, 56, 16
_TOP, _FLOOR = 40, 150
_BARS = 64
_STYLE = (
    "text{font:12px sans-serif;fill:#444}.bar{fill:#93a8c9}.now{stroke:#b45309;stroke-width:1.5}"
    ".then{stroke:#047857;stroke-width:1.5}.axis{stroke:#888}"
)


def to_svg(studies: Sequence[Study]) -> str:
    """Return one picture, a panel for each phase of each study."""
    panels = [
        _panel(f"{study.work.name}, {phase}", change)
        for study in studies
        for phase, change in study.changes.items()
        if change.now.steps
    ]
    height = _HEIGHT * len(panels)
    body = "".join(
        f'<g transform="translate(0 {_HEIGHT * index})">{panel}</g>'
        for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}"><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{body}</svg>\n'
    )


def _panel(title: str, change: Change) -> str:
    now, largest = change.current, change.current.largest
    parts = [
        _text(_LEFT, 16, f"{title}: steps by size", "start"),
        _text(_WIDTH - _RIGHT, 16, f"below: now {list(now)[:24]} (orange), better (green)"),
        *_bars(change),
        *_marks(now, largest, "now", _FLOOR + 4),
        *_marks(change.suggested, largest, "then", _FLOOR + 22),
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_FLOOR}" y2="{_FLOOR}"/>',
        _text(_LEFT - 6, _FLOOR + 16, "now"),
        _text(_LEFT - 6, _FLOOR + 34, "better"),
    ]
    return "".join(parts)


def _bars(change: Change) -> list[str]:
    largest = change.current.largest
    wide = -(-largest // _BARS)
    steps = Counter[int]()
    for size, count in change.now.steps_by_size.items():
        steps[(size - 1) // wide] += count
    most = max(steps.values())
    parts = [_text(_LEFT - 6, _TOP + 8, str(most))]
    for index, count in steps.items():
        left, right = _x(index * wide, largest), _x((index + 1) * wide, largest)
        height = (_FLOOR - _TOP) * count / most
        first, last = index * wide + 1, min((index + 1) * wide, largest)
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{_FLOOR - height:.1f}" '
            f'width="{max(right - left - 1, 0.5):.1f}" height="{height:.1f}">'
            f"<title>{first} to {last}: {count}</title></rect>"
        )
    return parts


def _marks(table: BucketTable, largest: int, kind: str, top: int) -> list[str]:
    return [
        f'<line class="{kind}" x1="{_x(size, largest):.1f}" x2="{_x(size, largest):.1f}" '
        f'y1="{top}" y2="{top + 14}"><title>{size}</title></line>'
        for size in table
    ]


def _text(x: int, y: int, text: str, anchor: str = "end") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(size: float, largest: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(size / largest, 1.0)
