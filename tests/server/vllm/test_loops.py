"""Which chat templates render a small conversation in time that is known beforehand."""

from __future__ import annotations

import pytest

from default_model.paths import CHAT_TEMPLATE
from server.vllm.templates import is_bounded
from server.vllm.tools import with_tool_prompt
from tests.server.vllm.test_default_prompt import SMOLLM2


def loops(*heads: str, inner: str = "x") -> str:
    """Return nested loops."""
    return "".join(f"{{% for {head} %}}" for head in heads) + inner + "{% endfor %}" * len(heads)


MESSAGES = "m in messages"
TEXT = "messages[0].content"
BOUNDED = [
    CHAT_TEMPLATE.read_text(),
    with_tool_prompt(SMOLLM2, system=True, parts=False),
    with_tool_prompt(SMOLLM2, system=False, parts=True),
    loops(MESSAGES, "c in m.content"),
    loops(MESSAGES, "call in m.tool_calls or []", "key, value in call.arguments | items"),
    loops(f"{MESSAGES}[1:]", "tool in tools", "key, value in tool.function.items()"),
    loops(f"{MESSAGES}[::-1]", "i in ['a', 'b']"),
    loops("i in range(messages | length - 1, -1, -1)"),
    loops("i in range(10)"),
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    + loops("m in turns", "n in turns"),
    "{% macro show(parts) %}" + loops("p in parts") + "{% endmacro %}"
    "{% for m in messages %}{% set parts = m.content %}{{ show(parts) }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% not a template",
]
UNBOUNDED = [
    loops("i in range(90000)", "j in range(90000)"),
    loops("i in range(90000)"),
    loops(MESSAGES, inner="{{ range(90000) | list }}"),
    "{% set n = 90000 %}" + loops("i in range(n)"),
    "{% set r = range(90000) %}" + loops("i in r", "j in r"),
    loops("i in range(100)", "j in range(100)", "k in range(100)", "l in range(100)"),
    loops("i in range(messages[0].content | length)"),
    loops("a in 'x' * 90000", "b in 'x' * 90000"),
    loops("a in [0] * 90000", "b in [0] * 90000"),
    loops(f"a in {TEXT}", f"b in {TEXT}"),
    f"{{% set t = {TEXT} %}}" + loops("a in t", "b in t"),
    loops(MESSAGES, "a in m.content", "b in m.content"),
    loops(MESSAGES, "n in messages", "o in messages"),
    loops(MESSAGES, "tool in tools", "n in messages"),
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(40) }}",
    "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(x) %}" + loops("a in x", "b in x") + f"{{% endmacro %}}{{{{ f({TEXT}) }}}}",
    "{% macro f(x) %}"
    + loops("a in x")
    + "{% endmacro %}"
    + loops(MESSAGES, inner=f"{{{{ f({TEXT}) }}}}"),
    "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call f() %}x{% endcall %}",
    "{% if tools %}{% set t = messages %}{% else %}{% set t = messages[0].content %}{% endif %}"
    + loops("a in t", "b in t"),
    "{{ lipsum(n=90000) }}",
    "{% include 'x' %}",
]


@pytest.mark.parametrize("template", BOUNDED)
def test_loops_over_the_conversation(template: str) -> None:
    assert is_bounded(template)


@pytest.mark.parametrize("template", UNBOUNDED)
def test_loops_that_multiply(template: str) -> None:
    assert not is_bounded(template)
