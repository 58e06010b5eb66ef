"""HTML report without external resources: verdict, charts over positions, texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rbln_backend.parity.run import Comparison, Outcome

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#111827;background:#fff}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #d1d5db;
text-align:left;vertical-align:top}
svg{width:100%;font-size:11px}svg line{stroke:#e5e7eb}svg polyline{fill:none;stroke-width:1.5}
svg text{text-anchor:middle;fill:#374151}svg text.y{text-anchor:end}svg .title{text-anchor:start}
.pass{color:#047857}.fail{color:#b91c1c}
@media(prefers-color-scheme:dark){body{color:#e5e7eb;background:#111827}svg text{fill:#d1d5db}
svg line{stroke:#374151}.pass{color:#34d399}.fail{color:#f87171}}
"""
_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 744, 28, 200
_COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626")
_SMALLEST = 1e-9


def html_report(outcome: Outcome) -> str:
    """Return the page."""
    model = escape(outcome.options.model)
    body = "\n".join(_body(outcome))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Parity of {model}</title><style>{_STYLE}</style></head>"
        f"<body><h1>Parity of {model}</h1>{body}</body></html>\n"
    )


def _body(outcome: Outcome) -> Iterator[str]:
    kind = "pass" if outcome.passed else "fail"
    yield f'<p class="{kind}"><strong>{kind.upper()}</strong></p>'
    if outcome.reasons:
        yield "<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in outcome.reasons) + "</ul>"
    yield "<table><tr><th>side</th><th>what ran</th><th>generation</th></tr>" + _sides(outcome)
    for pair in outcome.pairs:
        yield from _pair(pair)
    if (found := outcome.bisection) is not None:
        yield f"<h2>Layers against {found.reference}</h2>"
        lines = {
            "prefill": [layer.prefill for layer in found.layers],
            "decode": [layer.decode for layer in found.layers],
        }
        yield _chart(lines, "layer", "relative error of the hidden state")
    yield "<h2>Texts</h2><table>" + _texts(outcome)


def _sides(outcome: Outcome) -> str:
    rows = []
    for side, result in outcome.results.items():
        about = escape(", ".join(f"{name} {value}" for name, value in result.about.items()))
        rows.append(f"<tr><th>{side}</th><td>{about}</td><td>{result.seconds:.2f} s</td></tr>")
    return "".join(rows) + "</table>"


def _texts(outcome: Outcome) -> str:
    rows = []
    for index, prompt in enumerate(outcome.options.prompts):
        for side, result in outcome.results.items():
            text = escape(result.answers[index].text)
            rows.append(f"<tr><td>{escape(prompt)}</td><td>{side}</td><td>{text}</td></tr>")
    return "".join(rows) + "</table>"


def _pair(pair: Comparison) -> Iterator[str]:
    summary = pair.summary
    yield f"<h2>{pair.base} and {pair.other}</h2>"
    counts = f"{summary.same_tokens} of {summary.prompts} prompts continue with the same tokens"
    yield f"<p>{counts}, {summary.ties} part at a tie.</p>"
    if summary.max_delta is not None:
        lines = {
            f"prompt {index}": [position.max_delta for position in delta.positions]
            for index, delta in enumerate(pair.deltas[:4])
        }
        yield _chart(lines, "generated position", "max |difference of log-probabilities|")


def _chart(lines: Mapping[str, Sequence[float]], x_label: str, y_label: str) -> str:
    """Return a chart of lines over 0, 1, 2, ... with a logarithmic y axis.

    Zeros and infinities are drawn at its lower edge.
    """
    powers = [[_power(value) for value in line] for line in lines.values()]
    known = [power for line in powers for power in line if power is not None]
    low = math.floor(min(known, default=-6))
    high = max(math.ceil(max(known, default=0)), low + 1)
    last = max(map(len, powers)) - 1

    def y_of(power: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (power - low) / (high - low)

    def x_of(index: int) -> float:
        return _LEFT + (_RIGHT - _LEFT) * index / max(last, 1)

    parts = [
        f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y_of(power):.1f}" y2="{y_of(power):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y_of(power) + 4:.1f}" class="y">1e{power}</text>'
        for power in range(low, high + 1)
    ]
    parts += [
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 6}">{escape(x_label)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 22}">0</text>'
        f'<text x="{x_of(last):.1f}" y="{_HEIGHT - 22}">{last}</text>'
        f'<text x="12" y="12" class="title">{escape(y_label)}</text>'
    ]
    for index, (name, line) in enumerate(zip(lines, powers, strict=True)):
        ys = [y_of(low if power is None else power) for power in line]
        points = " ".join(f"{x_of(at):.1f},{y:.1f}" for at, y in enumerate(ys))
        # A style, because the page's rule for text overrides attributes.
        parts.append(
            f'<polyline points="{points}" stroke="{_COLORS[index]}"/>'
            f'<text x="{_RIGHT - 4}" y="{_TOP + 14 * (index + 1)}" class="y" '
            f'style="fill:{_COLORS[index]}">{escape(name)}</text>'
        )
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{escape(y_label)}">' + "".join(parts) + "</svg>"


def _power(value: float) -> float | None:
    return math.log10(value) if math.isfinite(value) and value > _SMALLEST else None
