"""Wishes about thinking, for models that have a switch, an effort, both or neither."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidValueError
from server.request.options import ThinkingSupport, normalize_thinking
from server.wire.endpoint import Endpoint

PLAIN = ThinkingSupport()
SWITCHED = ThinkingSupport(switch="enable_thinking", parses=True)
ALWAYS = ThinkingSupport(parses=True)


def test_a_template_shows_what_it_knows() -> None:
    qwen = "{% if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}"
    assert ThinkingSupport.of(qwen, parses=True, harmony=False) == SWITCHED
    deepseek = ThinkingSupport.of("{% if not thinking %}", parses=False, harmony=False)
    assert deepseek.switch == "thinking"
    assert ThinkingSupport.of("{{ reasoning_effort }}", parses=False, harmony=False).effort
    assert ThinkingSupport.of("", parses=True, harmony=True) == ThinkingSupport(
        effort=True, parses=True
    )
    assert ThinkingSupport.of("{{ messages }} rethinking", parses=False, harmony=False) == PLAIN


@pytest.mark.parametrize(
    ("thinking", "kind", "kwargs", "ignored"),
    [
        (SWITCHED, "enabled", {"enable_thinking": True}, []),
        (SWITCHED, "adaptive", {"enable_thinking": True}, []),
        (SWITCHED, "disabled", {"enable_thinking": False}, []),
        (ThinkingSupport(switch="thinking"), "enabled", {"thinking": True}, []),
        (PLAIN, "disabled", None, []),
        (PLAIN, "enabled", None, ["thinking"]),
        (ALWAYS, "enabled", None, []),
        (ALWAYS, "disabled", None, ["thinking"]),
    ],
)
def test_anthropics_thinking_is_the_models_switch(
    thinking: ThinkingSupport, kind: str, kwargs: dict[str, Any] | None, ignored: list[str]
) -> None:
    body: dict[str, Any] = {"thinking": {"type": kind}}
    assert normalize_thinking(Endpoint.MESSAGES, body, thinking) == ignored
    assert body == ({} if kwargs is None else {"chat_template_kwargs": kwargs})


def test_what_the_template_is_told_directly_wins() -> None:
    own = {"enable_thinking": False, "other": 1}
    body: dict[str, Any] = {"thinking": {"type": "enabled"}, "chat_template_kwargs": own}
    normalize_thinking(Endpoint.MESSAGES, body, SWITCHED)
    assert body["chat_template_kwargs"] == own


@pytest.mark.parametrize("given", [{}, {"type": "deep"}, {"type": []}, 7, []])
def test_a_kind_of_thinking_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(InvalidValueError) as caught:
        normalize_thinking(Endpoint.MESSAGES, {"thinking": given}, SWITCHED)
    assert caught.value.param == "thinking.type"


@pytest.mark.parametrize(
    ("endpoint", "body", "path"),
    [
        (Endpoint.MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (Endpoint.CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (Endpoint.RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
def test_an_effort_that_nobody_hears_is_told(
    endpoint: Endpoint, body: dict[str, Any], path: str
) -> None:
    assert normalize_thinking(endpoint, body, PLAIN) == [path]
    assert normalize_thinking(endpoint, body, SWITCHED) == []
    assert normalize_thinking(endpoint, body, ThinkingSupport(effort=True)) == []
    assert normalize_thinking(endpoint, {"reasoning": None}, PLAIN) == []
