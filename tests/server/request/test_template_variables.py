"""Which variables of a chat template a request may set, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidValueError, UnknownFieldError, UnsupportedFieldError
from server.request.options import TemplateVariables, filter_variables
from server.vllm.templates import declared_by
from server.wire.endpoint import Endpoint

VARIABLES = TemplateVariables(
    chat=frozenset(("greeting", "enable_thinking")),
    score=frozenset(("instruction",)),
    arguments=frozenset(("tokenize", "padding", "max_length", "tools", "bos_token")),
)


def settle(endpoint: Endpoint, body: dict[str, Any], **options: Any) -> list[str]:
    return filter_variables(endpoint, body, VARIABLES, options.pop("policy", "reject"), **options)


def test_declared_variables_pass_and_switches_of_other_models_are_ignored() -> None:
    given = {"greeting": "Hi", "enable_thinking": False, "thinking": True}
    body: dict[str, Any] = {"chat_template_kwargs": given}
    assert settle(Endpoint.CHAT, body) == ["chat_template_kwargs.thinking"]
    assert body == {"chat_template_kwargs": {"greeting": "Hi", "enable_thinking": False}}
    assert settle(Endpoint.CHAT, {"chat_template_kwargs": None}) == []
    assert settle(Endpoint.CHAT, {"chat_template_kwargs": "a text"}) == []


@pytest.mark.parametrize("name", sorted(VARIABLES.arguments))
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.TOKENIZE])
def test_arguments_of_the_tokenizer_are_refused_by_name(endpoint: Endpoint, name: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=f"'{name}' is an argument") as caught:
        settle(endpoint, {"chat_template_kwargs": {"greeting": "", name: True}})
    assert caught.value.param == f"chat_template_kwargs.{name}"
    assert ("send the field" in caught.value.message) == (name == "tools")


def test_other_names_are_unknown_fields() -> None:
    with pytest.raises(UnknownFieldError, match="did you mean 'greeting'") as caught:
        settle(Endpoint.RESPONSES, {"chat_template_kwargs": {"greting": 1}})
    assert caught.value.param == "chat_template_kwargs.greting"
    body: dict[str, Any] = {"chat_template_kwargs": {"greting": 1}}
    assert settle(Endpoint.RESPONSES, body, policy="warn") == []
    assert body == {"chat_template_kwargs": {}}


@pytest.mark.parametrize(
    ("endpoint", "name"), [(Endpoint.CHAT, "documents"), (Endpoint.RERANK, "instruction")]
)
def test_texts_that_no_template_shows_are_refused(endpoint: Endpoint, name: str) -> None:
    variables = TemplateVariables(chat=frozenset(), score=frozenset())
    with pytest.raises(UnsupportedFieldError) as caught:
        filter_variables(endpoint, {name: ["a text"]}, variables, "reject")
    assert caught.value.param == name
    assert filter_variables(endpoint, {name: None}, variables, "reject") == []
    # Documents are what a score is about.
    assert settle(Endpoint.RERANK, {"documents": ["a"], "instruction": "b"}) == []


def test_a_template_of_the_request_has_variables_of_its_own() -> None:
    template = "{% set a = b %}{{ messages }}{{ tools }}{{ c }}{% if d is defined %}{% endif %}"
    assert declared_by(template) == {"messages", "tools", "b", "c", "d"}
    own = declared_by("{{ tokenize }}{{ c }}")
    body: dict[str, Any] = {"chat_template_kwargs": {"c": 1}}
    assert settle(Endpoint.CHAT, body, own=own) == []
    with pytest.raises(UnknownFieldError):
        settle(Endpoint.CHAT, {"chat_template_kwargs": {"greeting": 1}}, own=own)
    with pytest.raises(UnsupportedFieldError):
        settle(Endpoint.CHAT, {"chat_template_kwargs": {"tokenize": True}}, own=own)


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="not a Jinja template") as caught:
        declared_by("{% for %}")
    assert caught.value.param == "chat_template"
