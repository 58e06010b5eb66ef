"""Wishes about thinking, for models that have a switch, an effort, both or neither."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidValueError
from server.frontend import Endpoint
from server.request.thinking import Thinker, settle_thinking

PLAIN = Thinker()
SWITCHED = Thinker(switch="enable_thinking", parses=True)
ALWAYS = Thinker(parses=True)


def test_a_template_shows_what_it_knows() -> None:
    qwen = "{% if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}"
    assert Thinker.of(qwen, parses=True, harmony=False) == SWITCHED
    deepseek = Thinker.of("{% if not thinking %}", parses=False, harmony=False)
    assert deepseek.switch == "thinking"
    assert Thinker.of("{{ reasoning_effort }}", parses=False, harmony=False).effort
    assert Thinker.of("", parses=True, harmony=True) == Thinker(effort=True, parses=True)
    assert Thinker.of("{{ messages }} rethinking", parses=False, harmony=False) == PLAIN


@pytest.mark.parametrize(
    ("thinker", "kind", "kwargs", "ignored"),
    [
        (SWITCHED, "enabled", {"enable_thinking": True}, []),
        (SWITCHED, "adaptive", {"enable_thinking": True}, []),
        (SWITCHED, "disabled", {"enable_thinking": False}, []),
        (Thinker(switch="thinking"), "enabled", {"thinking": True}, []),
        (PLAIN, "disabled", None, []),
        (PLAIN, "enabled", None, ["thinking"]),
        (ALWAYS, "enabled", None, []),
        (ALWAYS, "disabled", None, ["thinking"]),
    ],
)
def test_anthropics_thinking_is_the_models_switch(
    thinker: Thinker, kind: str, kwargs: dict[str, Any] | None, ignored: list[str]
) -> None:
    body: dict[str, Any] = {"thinking": {"type": kind}}
    assert settle_thinking(Endpoint.MESSAGES, body, thinker) == ignored
    assert body == ({} if kwargs is None else {"chat_template_kwargs": kwargs})


def test_what_the_template_is_told_directly_wins() -> None:
    own = {"enable_thinking": False, "other": 1}
    body: dict[str, Any] = {"thinking": {"type": "enabled"}, "chat_template_kwargs": own}
    settle_thinking(Endpoint.MESSAGES, body, SWITCHED)
    assert body["chat_template_kwargs"] == own


@pytest.mark.parametrize("given", [{}, {"type": "deep"}, {"type": []}, 7, []])
def test_a_kind_of_thinking_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(InvalidValueError) as caught:
        settle_thinking(Endpoint.MESSAGES, {"thinking": given}, SWITCHED)
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
    assert settle_thinking(endpoint, body, PLAIN) == [path]
    assert settle_thinking(endpoint, body, SWITCHED) == []
    assert settle_thinking(endpoint, body, Thinker(effort=True)) == []
    assert settle_thinking(endpoint, {"reasoning": None}, PLAIN) == []
