"""Masks are filled while the engine's thread does something else."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_backend.grammar.masks import MasksBeside


def step(**fields: Any) -> Any:
    given = {
        "has_structured_output_requests": True,
        "pending_structured_output_tokens": False,
        "scheduled_spec_decode_tokens": {},
    }
    return SimpleNamespace(**(given | fields))


def test_masks_are_filled_between_schedule_and_sampling() -> None:
    began, may_end, filled = threading.Event(), threading.Event(), []

    def fill(output: Any) -> Any:
        began.set()
        assert may_end.wait(10)
        filled.append(threading.current_thread())
        return output

    masks, output = MasksBeside(fill), step()
    masks.begin(output)
    assert began.wait(10)
    # Here the graph runs.
    may_end.set()
    assert masks.take(output) is output
    assert filled == [thread for thread in filled if thread is not threading.current_thread()]
    assert len(filled) == 1
    masks.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"scheduled_spec_decode_tokens": {"a": [1]}},
        {"pending_structured_output_tokens": True},
        {"has_structured_output_requests": False},
    ],
)
def test_masks_that_need_what_is_not_known_yet_are_filled_at_the_end(fields: Any) -> None:
    threads: list[threading.Thread] = []
    masks, output = (
        MasksBeside(lambda _: threads.append(threading.current_thread())),
        step(**fields),
    )
    masks.begin(output)
    assert threads == []
    masks.take(output)
    assert threads == [threading.current_thread()]


def test_a_step_gets_no_masks_of_another() -> None:
    masks, first, second = MasksBeside(lambda output: output), step(), step()
    masks.begin(first)
    assert masks.take(second) is second
    masks.close()


def test_a_failed_fill_fails_the_step() -> None:
    def fill(_: Any) -> Any:
        raise ValueError("no grammar")

    masks, output = MasksBeside(fill), step()
    masks.begin(output)
    with pytest.raises(ValueError, match="no grammar"):
        masks.take(output)
    masks.close()
