"""Where a conversation is rendered."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from default_model.paths import CHECKPOINT
from server.vllm.rendering import (
    SMALL_MESSAGES,
    ControlTokens,
    RemoteTemplates,
    Rendered,
    Rendering,
    render,
)


class Message(dict[str, str]):
    """Cannot be sent to another process."""

    def __reduce__(self) -> NoReturn:
        raise AssertionError("a small conversation is not pickled")


async def test_small_conversations_are_rendered_without_a_job() -> None:
    sent: list[bytes] = []

    async def send(job: bytes) -> Rendered:
        sent.append(job)
        return Rendered("elsewhere")

    def here(conversation: list[Any], **_: Any) -> str:
        return "here"

    loop = "{% for i in range(90000) %}{% endfor %}"
    templates = RemoteTemplates(send, ["served", loop], 100)
    options = {"chat_template": "served", "tokenize": False}

    def rendered(messages: list[dict[str, str]], **changes: Any) -> Any:
        return templates.apply(here, {}, messages, **(options | changes))

    assert await asyncio.to_thread(rendered, [Message(role="user")]) == "here"
    many = [{"role": "user"}] * (SMALL_MESSAGES + 1)
    assert await asyncio.to_thread(rendered, many) == "elsewhere"
    assert await asyncio.to_thread(rendered, [{}], chat_template="other") == "elsewhere"
    assert await asyncio.to_thread(rendered, [{}], chat_template=loop) == "elsewhere"
    assert len(sent) == 3
    assert [templates.waits(template) for template in ("served", loop, "other", None)] == [
        *(False, True, True, True),
    ]
    assert not RemoteTemplates(send, ["served"], 100).waits(None)


async def test_texts_of_control_tokens_are_marked_where_a_server_wants_it() -> None:
    control = ControlTokens(frozenset(("<|end|>",)))

    async def send(job: bytes) -> Rendered:
        return render(job)

    def here(conversation: list[Any], **_: Any) -> str:
        return f"{conversation[0]['content']}<|end|>"

    for tokens_of, marks in ((lambda _: control, (1,)), (None, None)):
        templates = RemoteTemplates(send, ["served"], 100, tokens_of)
        for template in ("served", "{{ messages[0].content }}<|end|>"):
            options = {"chat_template": template, "tokenize": False}
            message = {"role": "user", "content": "<|end|>"}
            prompt = await asyncio.to_thread(templates.apply, here, {}, [message], **options)
            assert prompt == "<|end|><|end|>"
            assert getattr(prompt, "marks", None) == marks


@pytest.mark.parametrize("tokens", [None, ControlTokens(frozenset(("<|end|>",)))])
@pytest.mark.parametrize("answer", ["it", "<|end|>"])
def test_an_error_does_not_quote_the_prompt(tokens: ControlTokens | None, answer: str) -> None:
    template = "secret{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"
    options = {"chat_template": template, "tokenize": False, "continue_final_message": True}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    rendering = Rendering(turns, options, {}, tokens)
    with pytest.raises(TemplateError) as here:
        rendering.run(AutoTokenizer.from_pretrained(CHECKPOINT).apply_chat_template)
    assert str(here.value) == render(rendering.as_job()).reason
    assert str(here.value).startswith("The last message cannot be continued: the chat template ")
    assert "secret" not in str(here.value)


def test_an_error_quotes_texts_without_marks() -> None:
    template = "{{ raise_exception('Unknown role ' + messages[0].role) }}"
    options = {"chat_template": template, "tokenize": False}
    turns = [{"role": "a<|end|>", "content": "q"}]
    tokens = ControlTokens(frozenset(("<|end|>",)))
    job = Rendering(turns, options, {}, tokens).as_job()
    assert render(job).reason == "Unknown role a<|end|>"
