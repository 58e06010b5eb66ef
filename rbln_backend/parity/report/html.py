"""The report as one HTML file: verdict, plots over positions and layers, texts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rbln_backend.parity.report.summary import summarize
from rbln_backend.parity.report.svg import line_chart
from rbln_backend.parity.run import Outcome, Pair

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


def html_report(outcome: Outcome) -> str:
    """Return the page; it loads nothing."""
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
    reasons = [str(failure) for failure in outcome.failures]
    found = outcome.bisection
    if found is not None and found.departure is not None:
        reasons.append(str(found.departure))
    if reasons:
        yield "<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in reasons) + "</ul>"
    yield _sides(outcome)
    for pair in outcome.pairs:
        yield from _pair(pair)
    if found is not None:
        yield f"<h2>Layers against {found.reference}</h2>"
        series = [
            ("prefill", [layer.prefill for layer in found.layers]),
            ("decode", [layer.decode for layer in found.layers]),
        ]
        yield line_chart(series, "layer", "relative error of the hidden state")
    yield _texts(outcome)


def _sides(outcome: Outcome) -> str:
    rows = "".join(
        f"<tr><th>{side}</th><td>{escape(', '.join(f'{k} {v}' for k, v in result.about.items()))}"
        f"</td><td>{result.seconds:.2f} s</td></tr>"
        for side, result in outcome.results.items()
    )
    return f"<table><tr><th>side</th><th>what ran</th><th>generation</th></tr>{rows}</table>"


def _pair(pair: Pair) -> Iterator[str]:
    summary = summarize(pair.deltas)
    yield f"<h2>{pair.base} and {pair.other}</h2>"
    told = f"{summary.same_tokens} of {summary.prompts} prompts continue with the same tokens"
    yield f"<p>{told}, {summary.ties} part at a tie.</p>"
    if summary.max_delta is None:
        return
    series = [
        (f"prompt {index}", [position.max_delta for position in delta.positions])
        for index, delta in enumerate(pair.deltas[:4])
    ]
    yield line_chart(series, "generated position", "max |difference of log-probabilities|")


def _texts(outcome: Outcome) -> str:
    rows = []
    for index, prompt in enumerate(outcome.options.prompts):
        for side, result in outcome.results.items():
            text = escape(result.answers[index].text)
            rows.append(f"<tr><td>{escape(prompt)}</td><td>{side}</td><td>{text}</td></tr>")
    return "<h2>Texts</h2><table>" + "".join(rows) + "</table>"
