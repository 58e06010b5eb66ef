"""Grammar masks that take longer than a step may wait: other requests go on, answers are equal."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.engine.conftest import Engine, Engines

pytestmark = pytest.mark.engine

PROMPTS = ["one", "two", "three", "four"]
REGEX = "[a-c]{4}-[0-9]{6}"
LATE = "rbln_grammar_masks_late_total"
Slow = Callable[[int], float]
"""Seconds that a mask takes longer, by its number."""


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Engine:
    return engines()


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Slow], list[int]]:
    """Make masks slow; the list holds the number of each that was filled."""
    from rbln_backend.vllm_compat.grammar import XgrammarGrammar

    fill = XgrammarGrammar.fill_bitmask
    numbers: list[int] = []

    def begin(slow: Slow) -> list[int]:
        def fill_slowly(self: Any, masks: Any, row: int) -> None:
            numbers.append(len(numbers))
            time.sleep(slow(numbers[-1]))
            fill(self, masks, row)

        monkeypatch.setattr(XgrammarGrammar, "fill_bitmask", fill_slowly)
        return numbers

    return begin


def params(row: int, **options: Any) -> Any:
    """Parameters of a request: even rows have a grammar, all are sampled by a seed."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    kind = StructuredOutputsParams(regex=REGEX) if row % 2 == 0 else None
    given = {"temperature": 1.0, "seed": row, "max_tokens": 20, "repetition_penalty": 1.1}
    return SamplingParams(structured_outputs=kind, **(given | options))


def answers(engine: Engine, **options: Any) -> list[Any]:
    found = engine.llm.generate(
        PROMPTS, [params(row, **options) for row in range(len(PROMPTS))], use_tqdm=False
    )
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in found]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "logprobs": 2}])
def test_answers_are_the_same(
    engine: Engine, slow_masks: Callable[[Slow], list[int]], options: dict[str, Any]
) -> None:
    expected = answers(engine, **options)
    before = engine.metric(LATE)
    # The first masks belong to steps of prefill.
    filled = slow_masks(lambda number: 0.06 if number in (0, 1, 5, 6, 11, 16) else 0.0)
    assert answers(engine, **options) == expected
    assert engine.metric(LATE) - before >= 4
    assert len(filled) > 16
    assert engine.used_blocks() == 0


def test_other_requests_go_on(engine: Engine, slow_masks: Callable[[Slow], list[int]]) -> None:
    slow_masks(lambda number: 0.5 if number == 3 else 0.0)
    core = engine.llm.llm_engine
    core.add_request("masked", PROMPTS[0], params(0))
    core.add_request("free", PROMPTS[1], params(1, max_tokens=200, ignore_eos=True))
    counts: dict[str, int] = {}
    free_at: list[int] = []
    ended = {}
    while core.has_unfinished_requests():
        for output in core.step():
            number = len(output.outputs[0].token_ids)
            if output.request_id == "masked" and number != counts.get("masked"):
                free_at.append(counts.get("free", 0))
            counts[output.request_id] = number
            ended[output.request_id] = output.outputs[0].finish_reason
    assert ended == {"masked": "stop", "free": "length"}
    # Tokens of the free request between two of the other one.
    gaps = [after - before for before, after in pairwise(free_at)]
    assert max(gaps) >= 5


def test_a_request_whose_mask_is_late_can_be_aborted(
    engine: Engine, slow_masks: Callable[[Slow], list[int]]
) -> None:
    slow_masks(lambda number: 0.3 if number == 2 else 0.0)
    core = engine.llm.llm_engine
    before = engine.metric(LATE)
    core.add_request("masked", PROMPTS[0], params(0))
    while engine.metric(LATE) == before:
        core.step()
    core.abort_request(["masked"])
    assert answers(engine)[1][1] in ("stop", "length")
    assert engine.used_blocks() == 0
