"""Where a conversation is rendered."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from server.vllm.rendering.job import Rendered
from server.vllm.rendering.tokenizer import SMALL_MESSAGES, RemoteTemplates


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
