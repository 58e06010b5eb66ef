"""A multimodal checkpoint served for its text: chats are answered, pictures are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multimodal_checkpoints import make_multimodal_checkpoint
from tests.server.real_server import RealServer

pytestmark = [pytest.mark.engine, pytest.mark.wide]

PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/none.png"}}


def test_chats_are_answered_and_pictures_refused(tmp_path: Path) -> None:
    checkpoint = make_multimodal_checkpoint("gemma3", tmp_path / "gemma3")
    with RealServer(checkpoint, tmp_path, "--language-model-only") as up:
        up.until_ready()
        for content, status in (
            ("Hello", 200),
            ([{"type": "text", "text": "Hello"}], 200),
            ([{"type": "text", "text": "What is this?"}, PICTURE], 400),
        ):
            message = {"role": "user", "content": content}
            body = {"model": "tiny", "messages": [message], "max_tokens": 4}
            answer = up.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == status, answer.text
        assert "takes text alone" in answer.json()["error"]["message"]
