"""Our calls of the SDK beside the vendor's: the same, but for named differences.

Theirs are the kept form (``call_form.json``); ours are the log of a run over the double.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import Job, Ran, run
from tests.vendor.call_form import call_form, kept_call_forms
from tests.vendor.differences import ALLOWED, unexplained, unused
from tests.vendor.runs import NUM_TOKENS, OPTIONS, RUNS, make_rounds

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Runs = Callable[[str], Ran]
WIDE = [
    pytest.param(name, marks=pytest.mark.wide)
    for name in ("one block", "window", "window shift", "experts", "two ranks")
]


@pytest.fixture(scope="module")
def runs(checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Our engine started as one of ``RUNS`` starts theirs, once for all tests here."""
    kept: dict[str, Ran] = {}

    def once(name: str) -> Ran:
        if name not in kept:
            theirs = RUNS[name]
            options = dict(OPTIONS) | dict(theirs.options)
            job = Job(theirs.checkpoint(checkpoints), options, make_rounds(), NUM_TOKENS)
            kept[name] = run([job], tmp_path_factory.mktemp("ours"), **dict(theirs.double))
            assert kept[name].answers == [job.expected()]
        return kept[name]

    return once


@pytest.mark.parametrize("name", ["llama host", *WIDE])
def test_our_calls_are_theirs_but_for_named_differences(name: str, runs: Runs) -> None:
    assert unexplained(call_form(runs(name).log), kept_call_forms()[name]) == []


def test_every_named_difference_is_one(runs: Runs) -> None:
    ours = call_form(runs("llama host").log)
    assert unused([(ours, kept_call_forms()["llama host"])]) == []
    assert all(difference.reason for difference in ALLOWED)


def test_a_fact_that_nobody_names_is_told() -> None:
    """The comparison bites: an op with one argument less, and a mode that is not sent."""
    theirs = kept_call_forms()["llama host"]
    op = next(fact for fact in theirs if fact.startswith("op flash_causal_attention_naive_prefill"))
    mode = "option prefill mode=['strict']"
    ours = [fact for fact in theirs if fact not in (op, mode)] + [op.replace(", None)", ")")]
    told = [line.split("(")[0] for line in unexplained(ours, theirs)]
    assert told == [
        "ours: op flash_causal_attention_naive_prefill",
        "theirs: op flash_causal_attention_naive_prefill",
        f"theirs: {mode}",
    ]
