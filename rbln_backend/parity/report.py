"""The two reports: for the terminal as documented, and JSON lines with a `kind`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from rbln_backend.parity.jobs import FloatArray
from rbln_backend.parity.run import Bisection, Comparison, Outcome, PromptDelta


def json_lines(outcome: Outcome) -> str:
    """Return the lines: run, sides, answers, prompts of each pair, pairs, layers, verdict."""
    lines = _lines(outcome)
    return "".join(json.dumps(_finite(line), default=str) + "\n" for line in lines)


def _lines(outcome: Outcome) -> Iterator[dict[str, Any]]:
    yield {"kind": "run", "options": asdict(outcome.options), "clamped": outcome.clamped}
    for side, result in outcome.results.items():
        yield {"kind": "side", "side": side, "about": result.about, "seconds": result.seconds}
        for index, answer in enumerate(result.answers):
            yield {
                "kind": "answer",
                "side": side,
                "prompt": index,
                "text": answer.text,
                "token_ids": answer.token_ids.tolist(),
                "ranking": answer.ranking(outcome.options.topk),
            }
    for pair in outcome.pairs:
        sides = {"base": pair.base, "other": pair.other}
        for index, delta in enumerate(pair.deltas):
            yield {"kind": "prompt", **sides, "prompt": index, **asdict(delta)}
        yield {"kind": "pair", **sides, **asdict(pair.summary)}
    if (found := outcome.bisection) is not None:
        for layer in found.layers:
            yield {"kind": "layer", "reference": found.reference, **asdict(layer)}
    departure = outcome.departure
    yield {
        "kind": "verdict",
        "passed": outcome.passed,
        "failures": [asdict(failure) for failure in outcome.failures],
        "departure": None if departure is None else asdict(departure),
    }


def _finite(value: Any) -> Any:
    """Return the value with null for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_CODES = {"green": "32", "yellow": "33", "red": "31", "bold": "1"}


def text_report(outcome: Outcome) -> str:
    """Return the whole report, with colours if the options say so."""
    return "\n".join(_TextReport(outcome).lines()) + "\n"


class _TextReport:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._options = outcome.options

    def lines(self) -> Iterator[str]:
        for index, text in enumerate(self._options.prompts):
            yield from self._prompt(index, text)
        for pair in self._outcome.pairs:
            yield self._pair(pair)
        if self._outcome.bisection is not None:
            yield from self._bisection(self._outcome.bisection)
        for reason in self._outcome.reasons:
            yield self._paint(f"FAIL {reason}", "red")
        if self._outcome.passed:
            yield self._paint("PASS", "green")
        elif self._outcome.bisection is not None and self._outcome.departure is None:
            yield "No layer departs: check the parts after the last one (norm, LM head, sampling)."

    def _prompt(self, index: int, text: str) -> Iterator[str]:
        pair = self._outcome.pairs[0]
        delta = pair.deltas[index]
        answers = {s: self._outcome.results[s].answers[index] for s in (pair.base, pair.other)}
        yield self._paint(f"== Prompt {index}: {text!r}", "bold")
        for side, answer in answers.items():
            yield f"  {side:<12} {len(answer.text):>5} characters: {answer.text!r}"
        yield f"  {_tokens(delta)}"
        if not self._options.inspect_logits or not delta.positions:
            return
        first, reference = delta.positions[0], answers[pair.base]
        vocab_size = self._outcome.results[pair.base].about["vocab_size"]
        yield "  first position:"
        yield f"    outliers (|delta| >= {self._options.limits.eps:g})  {first.outliers}"
        yield f"    vocabulary size            {vocab_size}"
        yield f"    tokens compared            {reference.top_ids.shape[1]}"
        yield f"    finite overlap             {first.overlap}"
        yield f"    max|delta|                 {first.max_delta:.6g}"
        yield f"    mean|delta|                {first.mean_delta:.6g}"
        yield f"    Pearson                    {self._pearson(first.pearson)}"
        if self._options.snippet:
            count = self._options.snippet_elems
            yield f"  log-probabilities by token id, head ... tail of {count}:"
            for side, answer in answers.items():
                values = answer.logprobs[0][np.argsort(answer.top_ids[0])]
                yield f"    {side:<12} {_ends(values, count)}"
        yield f"  top {self._options.topk} of either side:"
        yield f"    rank   {pair.other:>12} logprob      {pair.base:>12} logprob"
        count, other = self._options.topk, answers[pair.other]
        # Each side in its own order.
        ranks = zip(other.ranking(count), reference.ranking(count), strict=False)
        for rank, sides in enumerate(ranks, 1):
            columns = "   ".join(f"{token:>12} {value:>12.6f}" for token, value in sides)
            yield f"    {rank:>4}   {columns}"
        at, worst = max(enumerate(delta.positions), key=lambda entry: entry[1].max_delta)
        yield (
            f"  all {len(delta.positions)} positions: the largest difference is "
            f"{worst.max_delta:.6g}, at position {at} (mean {worst.mean_delta:.3g}, "
            f"Pearson {worst.pearson:.6f})"
        )

    def _pair(self, pair: Comparison) -> str:
        summary = pair.summary
        text = f"{pair.base} and {pair.other}: {summary.same_tokens} of {summary.prompts} prompts "
        text += "continue with the same tokens"
        if summary.ties:
            text += f", {summary.ties} part at a tie"
        if summary.max_delta is None or summary.min_pearson is None:
            return text
        return (
            f"{text}; {summary.positions} positions: max|delta| {summary.max_delta:.4g}, mean "
            f"{summary.mean_delta:.4g}, lowest Pearson {self._pearson(summary.min_pearson)}, "
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

    def _pearson(self, value: float) -> str:
        """Return the value in the documented colours: green from 0.999, yellow from 0.99."""
        color = "green" if value >= 0.999 else "yellow" if value >= 0.99 else "red"
        return self._paint("nan" if math.isnan(value) else f"{value:.6f}", color)

    def _paint(self, text: str, color: str) -> str:
        return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if self._options.color else text


def _tokens(delta: PromptDelta) -> str:
    at = delta.first_divergence
    if at is None:
        return "the same tokens throughout"
    kind = "at a tie of the reference" if delta.divergence_is_a_tie else "away from a tie"
    return f"tokens part at position {at}, {kind}; compared along the reference's after it"


def _ends(values: FloatArray, count: int) -> str:
    shown = [f"{value:.4f}" for value in values]
    if len(shown) > 2 * count:
        shown[count:-count] = ["..."]
    return "[" + ", ".join(shown) + "]"
