"""Figures of a position, by hand, and what is judged to fail."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rbln_backend.parity.jobs import Answer
from rbln_backend.parity.options import Limits
from rbln_backend.parity.run import compare, compare_position, judge

LIMITS = Limits(eps=0.5, min_pearson=0.99, max_mean_delta=0.1, max_outlier_share=0.01)


def _answer(tokens: list[int], top: list[list[int]], values: list[list[float]]) -> Answer:
    return Answer(
        prompt_ids=np.array([1], dtype=np.int64),
        token_ids=np.array(tokens, dtype=np.int64),
        text="",
        top_ids=np.array(top, dtype=np.int64),
        logprobs=np.array(values, dtype=np.float32),
    )


def _position(ref: dict[int, float], other: dict[int, float], eps: float = 0.5):
    return compare_position(
        np.array(list(ref)), np.array(list(ref.values()), dtype=np.float32),
        np.array(list(other)), np.array(list(other.values()), dtype=np.float32), eps,
    )  # fmt: skip


def test_only_tokens_of_both_sides_with_finite_values_are_compared() -> None:
    inf = float("-inf")
    position = _position({7: -0.5, 3: -1.0, 9: inf, 4: -3.0}, {3: -1.5, 7: -0.4, 9: -2.0, 8: -4.0})
    assert position.overlap == 2
    assert position.outliers == 1
    assert position.max_delta == pytest.approx(0.5)
    assert position.mean_delta == pytest.approx(0.3)
    assert position.margin == pytest.approx(0.5)
    assert not position.same_best


def test_pearson_is_nan_where_it_is_not_defined() -> None:
    assert math.isnan(_position({1: -1.0}, {1: -1.0}).pearson)
    assert math.isnan(_position({1: -1.0, 2: -1.0}, {1: -1.0, 2: -2.0}).pearson)
    assert _position({1: -1.0, 2: -2.0}, {1: -1.5, 2: -2.5}).pearson == pytest.approx(1.0)


def test_equal_answers_pass() -> None:
    answer = _answer([5, 6], [[5, 1], [6, 1]], [[-0.1, -3.0], [-0.2, -3.0]])
    delta = compare(answer, answer, 0.5)
    assert delta.first_divergence is None
    assert judge([delta], LIMITS) == []


def test_another_token_fails_unless_the_reference_was_undecided() -> None:
    decided = _answer([5, 6], [[5, 1], [6, 1]], [[-0.1, -3.0], [-0.2, -3.0]])
    away = _answer([5, 1], [[5, 1], [6, 1]], [[-0.1, -3.0], [-0.25, -3.0]])
    (failure,) = judge([compare(decided, away, 0.5)], LIMITS)
    assert (failure.prompt, failure.position) == (0, 1)
    assert "another token" in failure.reason
    tie = _answer([5, 6], [[5, 1, 2], [6, 1, 2]], [[-0.1, -3.0, -9.0], [-0.70, -0.71, -9.0]])
    other = _answer([5, 1], [[5, 1, 2], [1, 6, 2]], [[-0.1, -3.0, -9.0], [-0.70, -0.72, -9.0]])
    delta = compare(tie, other, 0.5)
    assert delta.divergence_is_a_tie
    assert judge([delta], LIMITS) == []


def test_without_logprobs_a_divergence_fails() -> None:
    nothing: list[list[int]] = [[], []]
    delta = compare(_answer([5, 6], nothing, nothing), _answer([5, 7], nothing, nothing), 0.5)
    assert [str(failure) for failure in judge([delta], LIMITS)] == [
        "prompt 0, position 1: another token where the reference was decided"
    ]


def test_each_limit_is_reported_once_per_prompt_at_its_first_position() -> None:
    ids = [[1, 2, 3]] * 3
    ref = _answer([1, 1, 1], ids, [[-1.0, -2.0, -3.0]] * 3)
    bad = _answer([1, 1, 1], ids, [[-1.0, -2.0, -3.0], [-1.0, -3.5, -2.0], [-1.0, -3.5, -2.0]])
    failures = judge([compare(ref, bad, 0.5)], LIMITS)
    assert [failure.position for failure in failures] == [1, 1, 1]
    assert "Pearson" in failures[0].reason
    assert "mean |delta|" in failures[1].reason
    assert "2 of 3 tokens differ by 0.5 or more" in failures[2].reason


def test_no_common_token_fails() -> None:
    delta = compare(_answer([1], [[1]], [[-1.0]]), _answer([2], [[2]], [[-1.0]]), 0.5)
    assert any("no token in common" in failure.reason for failure in judge([delta], LIMITS))
