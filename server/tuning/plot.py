"""SVG plot of studies: steps by size, with the current and the suggested buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from server.tuning.search import Change
from server.tuning.study import Study

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 760, 200, 56, 16
_TOP, _FLOOR = 40, 150
_BARS = 64
_STYLE = (
    "text{font:12px sans-serif;fill:#444}.bar{fill:#93a8c9}.now{stroke:#b45309;stroke-width:1.5}"
    ".then{stroke:#047857;stroke-width:1.5}.axis{stroke:#888}"
)


def to_svg(studies: Sequence[Study]) -> str:
    """Return one plot with a panel for each phase of each study."""
    panels = [
        "".join(_panel(f"{study.work.name}, {phase}", change))
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


def _panel(title: str, change: Change) -> Iterator[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / change.current.largest
    wide = -(-change.current.largest // _BARS)
    steps = Counter[int]()
    for size, count in change.now.steps_by_size.items():
        steps[(size - 1) // wide * wide] += count
    most = max(steps.values())
    yield _text(_LEFT, 16, f"{title}: steps by size", "start")
    below = f"below: now {list(change.current)[:24]} (orange), better (green)"
    yield _text(_WIDTH - _RIGHT, 16, below)
    yield _text(_LEFT - 6, _TOP + 8, str(most))
    for first, count in steps.items():
        high = (_FLOOR - _TOP) * count / most
        yield (
            f'<rect class="bar" x="{_LEFT + scale * first:.1f}" y="{_FLOOR - high:.1f}" '
            f'width="{max(scale * wide - 1, 0.5):.1f}" height="{high:.1f}">'
            f"<title>{first + 1} to {first + wide}: {count}</title></rect>"
        )
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_FLOOR}" y2="{_FLOOR}"/>'
    rows = (("now", "now", change.current, 4), ("then", "better", change.suggested, 22))
    for kind, label, table, below_floor in rows:
        top = _FLOOR + below_floor
        yield _text(_LEFT - 6, top + 12, label)
        for size in table:
            x = f"{_LEFT + scale * size:.1f}"
            line = f'<line class="{kind}" x1="{x}" x2="{x}" y1="{top}" y2="{top + 14}">'
            yield f"{line}<title>{size}</title></line>"


def _text(x: int, y: int, text: str, anchor: str = "end") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
