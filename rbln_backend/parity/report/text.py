"""The report on the terminal: the documented blocks per prompt, then every position in a line."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rbln_backend.parity.job import Answer, FloatArray
from rbln_backend.parity.positions import PositionDelta, PromptDelta
from rbln_backend.parity.report.color import Paint
from rbln_backend.parity.report.summary import summarize
from rbln_backend.parity.run import Bisection, Outcome, Pair


def text_report(outcome: Outcome) -> str:
    """Return the whole report, with colours if the options say so."""
    return "\n".join(_TextReport(outcome).lines()) + "\n"


class _TextReport:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._options = outcome.options
        self._paint = Paint(enabled=outcome.options.color)

    def lines(self) -> Iterator[str]:
        for index, text in enumerate(self._options.prompts):
            yield from self._prompt(index, text)
        for pair in self._outcome.pairs:
            yield self._pair(pair)
        if self._outcome.bisection is not None:
            yield from self._bisection(self._outcome.bisection)
        yield from self._verdict()

    def _prompt(self, index: int, text: str) -> Iterator[str]:
        pair = self._outcome.pairs[0]
        delta = pair.deltas[index]
        reference, rbln = (self._outcome.results[s].answers[index] for s in (pair.base, pair.other))
        yield self._paint(f"== Prompt {index}: {text!r}", "bold")
        for side, answer in ((pair.base, reference), (pair.other, rbln)):
            yield f"  {side:<12} {len(answer.text):>5} characters: {answer.text!r}"
        yield f"  {_tokens(delta)}"
        if not self._options.inspect_logits or not delta.positions:
            return
        yield from self._position(delta.positions[0], reference)
        if self._options.snippet:
            yield from self._snippet(pair, reference, rbln)
        yield from self._top(pair, reference, rbln)
        yield _worst(delta)

    def _position(self, position: PositionDelta, reference: Answer) -> Iterator[str]:
        eps = self._options.limits.eps
        yield "  first position:"
        yield f"    outliers (|delta| >= {eps:g})  {position.outliers}"
        yield f"    tokens compared            {reference.top_ids.shape[1]}"
        yield f"    finite overlap             {position.overlap}"
        yield f"    max|delta|                 {position.max_delta:.6g}"
        yield f"    mean|delta|                {position.mean_delta:.6g}"
        yield f"    Pearson                    {self._paint.pearson(position.pearson)}"

    def _snippet(self, pair: Pair, reference: Answer, rbln: Answer) -> Iterator[str]:
        yield f"  log-probabilities by token id, head ... tail of {self._options.snippet_elems}:"
        for side, answer in ((pair.base, reference), (pair.other, rbln)):
            order = np.argsort(answer.top_ids[0])
            yield f"    {side:<12} {self._ends(answer.logprobs[0][order])}"

    def _ends(self, values: FloatArray) -> str:
        count = self._options.snippet_elems
        shown = [f"{value:.4f}" for value in values]
        if len(shown) > 2 * count:
            shown = [*shown[:count], "...", *shown[-count:]]
        return "[" + ", ".join(shown) + "]"

    def _top(self, pair: Pair, reference: Answer, rbln: Answer) -> Iterator[str]:
        others = dict(zip(rbln.top_ids[0].tolist(), rbln.logprobs[0].tolist(), strict=True))
        names = f"{pair.base:>12}   {pair.other:>12}"
        yield f"  top {self._options.topk}:   token   {names}        delta"
        best = zip(reference.top_ids[0], reference.logprobs[0], strict=True)
        for (token, value), _ in zip(best, range(self._options.topk), strict=False):
            other = others.get(int(token), float("nan"))
            yield f"    {int(token):>12}   {value:>12.6f}   {other:>12.6f} {other - value:>+12.6f}"

    def _pair(self, pair: Pair) -> str:
        summary = summarize(pair.deltas)
        text = f"{pair.base} and {pair.other}: {summary.same_tokens} of {summary.prompts} prompts "
        text += "continue with the same tokens"
        if summary.ties:
            text += f", {summary.ties} part at a tie"
        if summary.max_delta is None or summary.min_pearson is None:
            return text
        return (
            f"{text}; {summary.positions} positions: max|delta| {summary.max_delta:.4g}, mean "
            f"{summary.mean_delta:.4g}, lowest Pearson {self._paint.pearson(summary.min_pearson)}, "
            f"{summary.outliers} outliers"
        )

    def _bisection(self, found: Bisection) -> Iterator[str]:
        yield (
            f"Layers against {found.reference}, prompt {found.prompt}: {found.num_tokens} tokens, "
            f"{found.num_decoded} of them decoded. Relative error after each layer:"
        )
        for layer in found.layers:
            is_first = found.departure is not None and found.departure.layer == layer.name
            line = f"    {layer.name:<32} prefill {layer.prefill:.3e}   decode {layer.decode:.3e}"
            yield self._paint(f"{line}   <- departs", "red") if is_first else line

    def _verdict(self) -> Iterator[str]:
        for failure in self._outcome.failures:
            yield self._paint(f"FAIL {failure}", "red")
        found = self._outcome.bisection
        if found is not None:
            if found.departure is not None:
                yield self._paint(f"FAIL {found.departure}", "red")
            elif self._outcome.failures:
                yield "No layer departs: look behind the last one (norm, LM head, sampling)."
        if self._outcome.passed:
            yield self._paint("PASS", "green")


def _tokens(delta: PromptDelta) -> str:
    at = delta.first_divergence
    if at is None:
        return "the same tokens throughout"
    kind = "at a tie of the reference" if delta.divergence_is_a_tie else "away from a tie"
    return f"tokens part at position {at}, {kind}; compared along the reference's after it"


def _worst(delta: PromptDelta) -> str:
    at = max(range(len(delta.positions)), key=lambda index: delta.positions[index].max_delta)
    position = delta.positions[at]
    return (
        f"  all {len(delta.positions)} positions: the largest difference is "
        f"{position.max_delta:.6g}, at position {at} (mean {position.mean_delta:.3g}, "
        f"Pearson {position.pearson:.6f})"
    )
