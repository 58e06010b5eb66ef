"""Options that the server acts on itself: tiers, drafts, thinking, template variables."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.errors import (
    InvalidValueError,
    PermissionDeniedError,
    RequestError,
    UnknownFieldError,
    UnsupportedFieldError,
)
from server.request.options import (
    DraftOptions,
    TemplateVariables,
    ThinkingSupport,
    Tier,
    filter_variables,
    get_tiers,
    granted_tier,
    normalize_thinking,
    pop_drafts,
    pop_tier,
)
from server.request.tables import extra_schemas
from server.settings import SettingsError
from server.vllm.templates import declared_by
from server.wire import Endpoint
from tests.server.http.test_auth import ring
from tests.server.scripted import Running, running

CHAT = "/v1/chat/completions"
KEYS = "anyone=k1\njobs[flex]=k2\ngold[priority+default]=k3\n"


@pytest.mark.parametrize(
    ("endpoint", "requested", "found"),
    [
        (Endpoint.CHAT, None, None),
        (Endpoint.CHAT, "auto", "auto"),
        (Endpoint.RESPONSES, "flex", "flex"),
        (Endpoint.MESSAGES, "auto", "auto"),
        (Endpoint.MESSAGES, "standard_only", "default"),
    ],
)
def test_tiers_of_bodies(endpoint: Endpoint, requested: str | None, found: str | None) -> None:
    body: dict[str, Any] = {"service_tier": requested, "model": "m"}
    assert pop_tier(endpoint, body) == found
    assert body == {"model": "m"}


@pytest.mark.parametrize(
    ("endpoint", "requested"),
    [
        (Endpoint.CHAT, "scale"),
        (Endpoint.CHAT, 1),
        (Endpoint.MESSAGES, "flex"),
        (Endpoint.CHAT, []),
    ],
)
def test_unknown_tiers_are_rejected(endpoint: Endpoint, requested: object) -> None:
    with pytest.raises(InvalidValueError, match="'service_tier' must be one of 'auto'"):
        pop_tier(endpoint, {"service_tier": requested})


def test_the_first_tier_of_a_key_is_what_it_gets_without_a_word() -> None:
    gold = get_tiers("priority+default")
    assert [granted_tier(requested, gold) for requested in (None, "auto", "default")] == [
        Tier.PRIORITY,
        Tier.PRIORITY,
        Tier.DEFAULT,
    ]
    with pytest.raises(
        PermissionDeniedError, match=r"'flex' is not allowed.*: 'priority', 'default'\."
    ):
        granted_tier("flex", gold)


def test_tiers_behind_the_name_of_a_key(tmp_path: Path) -> None:
    keys = ring("jobs[flex]=word")
    assert keys._given[0].name == "jobs"
    assert keys._given[0].tiers == (Tier.FLEX,)
    with pytest.raises(SettingsError, match=r"tiers of 'jobs' must be of default, flex, priority"):
        ring("jobs[slow]=word")
    (tmp_path / "keys").write_text("jobs[]=word\n")
    with pytest.raises(SettingsError, match="line 1"):
        ring(file=tmp_path / "keys")


async def ask(service: Running, key: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await service.client.post(CHAT, json={"do": "answer", **body}, headers=headers)


async def test_keys_may_be_limited_to_tiers(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    settings = {"api_key_file": tmp_path / "keys", "open_metrics": True}
    async with running(tmp_path, **settings) as service:
        for key, tier, status in (
            ("k1", None, 200),
            ("k1", "priority", 200),
            ("k2", None, 200),
            ("k2", "auto", 200),
            ("k2", "default", 403),
            ("k2", "priority", 403),
            ("k3", "flex", 403),
            ("k3", "default", 200),
            ("k3", None, 200),
        ):
            answer = await ask(service, key, service_tier=tier)
            assert answer.status_code == status, (key, tier)
            if status == 403:
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("permission_denied", "service_tier")
        for tier, count in (("default", 2), ("priority", 2), ("flex", 2)):
            line = f'rbln_tier_requests_total{{outcome="ok",tier="{tier}"'
            assert await service.metric(line) == count


async def test_flex_takes_nobodys_place(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=2) as service:
        body = {"do": "wait", "service_tier": "flex"}
        flex = [asyncio.create_task(service.client.post(CHAT, json=body)) for _ in range(2)]
        await service.until("rbln_admission_flex_in_flight", 2)
        assert await service.metric("rbln_admission_in_flight") == 0
        online = [asyncio.create_task(ask(service, "", do="wait")) for _ in range(2)]
        await service.until("rbln_admission_in_flight", 2)
        service.frontend.go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*flex, *online)] == [200] * 4
        for name in ("flex_in_flight", "in_flight"):
            assert await service.metric(f"rbln_admission_{name}") == 0


async def test_flex_has_its_own_limit(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=1) as service:
        body = {"do": "wait", "service_tier": "flex"}
        first = asyncio.create_task(service.client.post(CHAT, json=body))
        await service.until("rbln_admission_flex_in_flight")
        refused = await service.client.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "of the tier flex" in refused.json()["error"]["message"]
        # Its permit came back, too.
        assert (await ask(service, "")).status_code == 200
        service.frontend.go_on.set()
        assert (await first).status_code == 200


TEXT = {"type": "content", "content": "a b"}
PARTS = {
    "type": "content",
    "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}],
}


@pytest.mark.parametrize(
    ("body", "speculates", "options", "ignored"),
    [
        ({}, True, DraftOptions(), []),
        ({"prediction": TEXT}, True, DraftOptions(prediction="a b"), []),
        ({"prediction": PARTS, "n": 1}, True, DraftOptions(prediction="a b"), []),
        ({"prediction": None, "speculative": None}, True, DraftOptions(), []),
        ({"speculative": False}, True, DraftOptions(off=True), []),
        ({"speculative": True}, True, DraftOptions(), []),
        # A hint without effect.
        ({"prediction": TEXT}, False, DraftOptions(), ["prediction"]),
        ({"speculative": False}, False, DraftOptions(off=True), []),
        ({"speculative": True}, False, DraftOptions(), ["speculative"]),
        ({"prediction": TEXT, "speculative": False}, True, DraftOptions(off=True), ["prediction"]),
    ],
)
def test_a_chat_says_what_it_wants(
    body: dict[str, Any], speculates: bool, options: DraftOptions, ignored: list[str]
) -> None:
    body = {"model": "m", **body}
    assert pop_drafts(Endpoint.CHAT, body, speculates=speculates) == (options, ignored)
    assert body.keys() <= {"model", "n"}


@pytest.mark.parametrize(
    "endpoint", [Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.RESPONSES, Endpoint.MESSAGES]
)
def test_every_answer_can_be_had_without_drafts(endpoint: Endpoint) -> None:
    assert pop_drafts(endpoint, {"speculative": False}, speculates=True)[0].off
    assert extra_schemas(endpoint)["speculative"]["type"] == ["boolean", "null"]


def test_elsewhere_the_fields_stay_unknown() -> None:
    body = {"prediction": TEXT}
    assert pop_drafts(Endpoint.COMPLETION, body, speculates=True) == (DraftOptions(), [])
    assert body == {"prediction": TEXT}
    body = {"speculative": False}
    assert pop_drafts(Endpoint.EMBEDDINGS, body, speculates=True) == (DraftOptions(), [])
    assert body == {"speculative": False}


@pytest.mark.parametrize("speculates", [True, False])
@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"prediction": TEXT, "n": 2}, UnsupportedFieldError, "prediction"),
        ({"prediction": "text"}, InvalidValueError, "prediction"),
        ({"prediction": {"type": "text", "content": "a"}}, InvalidValueError, "prediction.type"),
        ({"prediction": {"type": "content"}}, InvalidValueError, "prediction.content"),
        ({"prediction": {**TEXT, "extra": 1}}, InvalidValueError, "prediction.extra"),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            InvalidValueError,
            "prediction.content[0]",
        ),
        ({"speculative": 0}, InvalidValueError, "speculative"),
    ],
)
def test_what_is_no_wish_is_refused_by_name(
    body: dict[str, Any], speculates: bool, error: type[RequestError], param: str
) -> None:
    with pytest.raises(error) as caught:
        pop_drafts(Endpoint.CHAT, dict(body), speculates=speculates)
    assert caught.value.param == param
    assert param in caught.value.message


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
    assert settle(Endpoint.CHAT, body, of_request=own) == []
    with pytest.raises(UnknownFieldError):
        settle(Endpoint.CHAT, {"chat_template_kwargs": {"greeting": 1}}, of_request=own)
    with pytest.raises(UnsupportedFieldError):
        settle(Endpoint.CHAT, {"chat_template_kwargs": {"tokenize": True}}, of_request=own)


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="not a Jinja template") as caught:
        declared_by("{% for %}")
    assert caught.value.param == "chat_template"
