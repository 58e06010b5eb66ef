"""Pages of other origins: refused by default, allowed by name, errors readable by them too."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.settings import SettingsError, load_settings
from tests.server.scripted import running

CHAT = "/v1/chat/completions"
PAGE = "https://page.example"
ASK = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_it_is_off_by_default(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.get("/v1/models", headers={"origin": PAGE})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await service.client.options(CHAT, headers=ASK)).status_code == 405


async def test_a_named_origin_may_ask_and_read_errors(tmp_path: Path) -> None:
    settings = {"allowed_origins": (PAGE,), "api_key": ("k",)}
    async with running(tmp_path, **settings) as service:
        preflight = await service.client.options(CHAT, headers=ASK)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["x-request-id"]
        refused = await service.client.post(CHAT, json={}, headers={"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        stream = await service.client.post(
            CHAT,
            json={"do": "answer", "stream": True},
            headers={"origin": PAGE, "x-api-key": "k"},
        )
        assert stream.headers["access-control-allow-origin"] == PAGE
        other = await service.client.options(CHAT, headers={**ASK, "origin": "https://evil"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        error = other.json()["error"]
        assert (error["code"], error["type"]) == ("origin_refused", "invalid_request_error")
        assert "refused for its: origin " in error["message"]
        assert other.headers["x-request-id"] and other.headers["vary"].startswith("Origin")
        asked = {**ASK, "access-control-request-method": "PURGE"}
        answer = await service.client.options("/v1/messages", headers=asked)
        assert answer.json()["type"] == "error"
        assert "refused for its: method " in answer.json()["error"]["message"]


async def test_any_origin(tmp_path: Path) -> None:
    async with running(tmp_path, allowed_origins=("*",)) as service:
        answer = await service.client.get("/v1/models", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_lists_in_flags_and_contradictions() -> None:
    assert load_settings({"allowed_origins": ['["a", "b"]']}, {}).allowed_origins == ("a", "b")
    assert load_settings({"allowed_origins": ["a,b", "c"]}, {}).allowed_origins == ("a", "b", "c")
    with pytest.raises(SettingsError, match="name the origins"):
        load_settings({"allowed_origins": ["*"], "allow_credentials": True}, {})
