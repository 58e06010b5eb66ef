"""Pages of Anthropic's list of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.wire import JsonObject
from tests.server.scripted import ScriptedEngine, ScriptedFrontend, ScriptedLauncher, running


class SeveralModels(ScriptedFrontend):
    """Serves four models."""

    async def models(self) -> list[JsonObject]:
        return [{"id": name, "object": "model"} for name in "abcd"]


@pytest.mark.parametrize(
    ("params", "listed"),
    [
        ({}, "abcd"),
        ({"after_id": "b"}, "cd"),
        ({"before_id": "c"}, "ab"),
        ({"after_id": "a", "before_id": "d"}, "bc"),
        ({"after_id": "c", "before_id": "b"}, ""),
        ({"after_id": "b", "before_id": "b"}, ""),
    ],
)
async def test_pages_are_cut_by_both_ends(
    tmp_path: Path, params: dict[str, str], listed: str
) -> None:
    launcher = ScriptedLauncher(engine=ScriptedEngine(SeveralModels()))
    launcher.launched.set()
    async with running(tmp_path, launcher) as service:
        headers = {"anthropic-version": "2023-06-01"}
        answer = await service.client.get("/v1/models", params=params, headers=headers)
        assert answer.status_code == 200, answer.text
        assert "".join(model["id"] for model in answer.json()["data"]) == listed
