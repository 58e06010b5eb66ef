"""Answers with tool calls, cut behind each of their tokens: streams and whole answers agree."""

from __future__ import annotations

import pytest

from server.tools import NATURAL, Ending, finish_reason, is_whole
from tests.server.vllm.call_forms import (
    ARGUMENTS,
    CODER,
    FORMS,
    HERMES,
    OTHER,
    Form,
    reader,
    request,
)

pytestmark = pytest.mark.engine

LENGTH = Ending("length")
CALLS = [("look", ARGUMENTS), ("ring", OTHER)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_answer_that_ended_by_itself_has_all_of_it(form: Form) -> None:
    one = reader(form)
    for parts in (one.streamed(len(one.ids)), one.whole(len(one.ids))):
        assert parts == (form.thought, form.said, CALLS)


@pytest.mark.parametrize(
    ("form", "ending"),
    [
        *((form, LENGTH) for form in FORMS),
        *((form, Ending("stop", "x")) for form in (HERMES, CODER)),
        (HERMES, Ending("content_filter")),
    ],
    ids=str,
)
def test_a_call_that_was_cut_is_as_long_as_it_was_generated(form: Form, ending: Ending) -> None:
    one = reader(form)
    for end in range(1, len(one.ids) + 1):
        reasoning, content, calls = one.streamed(end, ending)
        assert one.whole(end, ending) == (reasoning, content, calls), end
        assert (form.thought or "").startswith((reasoning or "").rstrip())
        assert (form.said or "").startswith((content or "").rstrip()), end
        for (name, text), (full_name, full) in zip(calls, CALLS, strict=False):
            assert name == full_name
            assert full.startswith(text)
            assert text.startswith("{")
        # Only the last call may lack something.
        assert all(is_whole(text) for _, text in calls[:-1])


@pytest.mark.parametrize("size", [2, 3, 7, 100])
@pytest.mark.parametrize("form", [HERMES, CODER], ids=str)
def test_pieces_of_any_size_make_the_same_answer(form: Form, size: int) -> None:
    one = reader(form)
    for end in range(1, len(one.ids) + 1):
        assert one.streamed(end, LENGTH, size) == one.streamed(end, LENGTH), end


def test_whole_answers_have_what_was_streamed_before() -> None:
    one = reader(HERMES)
    parser = one.parser()
    for text, token in zip(one.texts[:40], one.ids[:40], strict=True):
        parser.parse_delta(text, [token], one.request, [1], finished=False)
    # What a text says that is parsed afterwards does not matter.
    assert parser.parse("", one.request) == parser.streamed.parts()
    assert parser.streamed.calls


def test_logprobs_of_pieces_without_text_have_a_delta() -> None:
    one = reader(HERMES)
    asked = request(logprobs=True, top_logprobs=1)
    parser = one.parser()
    for text, token in zip(one.texts, one.ids, strict=True):
        assert parser.parse_delta(text, [token], asked, [1], finished=False) is not None


@pytest.mark.parametrize(
    ("ending", "calls", "named", "reason"),
    [
        (NATURAL, ["{}"], False, "tool_calls"),
        (NATURAL, ["{}"], True, "stop"),
        (NATURAL, ["{}", '{"a'], False, "stop"),
        (NATURAL, [], False, "stop"),
        (Ending("stop", "x"), ["{}"], False, "tool_calls"),
        (Ending("stop", "x"), ["{"], False, "stop"),
        (LENGTH, ["{}"], False, "length"),
        (LENGTH, ["{}"], True, "length"),
        (Ending("content_filter"), ["{}"], False, "content_filter"),
        (Ending("abort"), ["{"], False, "abort"),
    ],
)
def test_finish_reasons(ending: Ending, calls: list[str], named: bool, reason: str) -> None:
    assert finish_reason(ending, calls, named=named) == reason
