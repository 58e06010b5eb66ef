"""Progress of a prompt in its stream: comments, and chunks on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import Running, running


async def _frames(service: Running, until: int, path: str, **fields: Any) -> list[str]:
    """Return the first frames of a stream whose answer waits, and let it go on."""
    body = {"do": "wait", "stream": True, "progress": [40, 60, 20, 90], **fields}
    frames: list[str] = []
    async with service.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            frames += [line] if line else []
            if len(frames) == until:
                service.frontend.go_on.set()
    return frames


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_stream_has_comments(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, stream_commit_s=0.01) as service:
        frames = await _frames(service, 3, path)
        assert frames[:2] == ["data: first", ": prompt 40/100 tokens, about 0.0 s left"]
        # At most one in a second; the latest, 40 ms for 80 of 90 tokens.
        assert frames[2:] == [": prompt 90/100 tokens, about 0.0 s left", "data: [DONE]"]


async def test_chunks_on_request_come_after_every_step(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        frames = await _frames(
            service, 4, "/v1/chat/completions", return_progress=True, model="scripted"
        )
    chunks = [json.loads(frame[6:]) for frame in frames if "prompt_progress" in frame]
    assert [chunk["prompt_progress"] for chunk in chunks] == [
        {"processed": 40, "total": 100, "cache": 10, "time_ms": 10, "eta_ms": 20},
        {"processed": 60, "total": 100, "cache": 10, "time_ms": 20, "eta_ms": 16},
        {"processed": 90, "total": 100, "cache": 10, "time_ms": 40, "eta_ms": 5},
    ]
    assert {(c["object"], c["model"], len(c["choices"])) for c in chunks} == {
        ("chat.completion.chunk", "scripted", 0)
    }
    assert frames[-1] == "data: [DONE]"


async def test_the_first_progress_commits_a_stream_that_asked_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, stream_commit_s=60) as service:
        body = {"do": "late", "stream": True, "progress": [40], "return_progress": True}
        async with service.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            chunk = json.loads((await anext(lines))[6:])
            assert (chunk["object"], chunk["model"]) == ("text_completion", "scripted")
            service.frontend.go_on.set()
            assert "data: [DONE]" in [line async for line in lines]


@pytest.mark.parametrize("value", ["yes", 1])
async def test_a_wrong_value_is_refused(tmp_path: Path, value: object) -> None:
    async with running(tmp_path) as service:
        body = {"do": "answer", "return_progress": value}
        answer = await service.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "return_progress"
