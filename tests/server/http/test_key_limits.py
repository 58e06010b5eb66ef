"""Limits of API keys over a socket: headers, refusals, their end and their reload."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from server.http.auth import Access
from server.settings import ServerSettings, SettingsError
from tests.server.scripted import Running, running

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


async def _post(
    service: Running, key: str, path: str = CHAT, do: str = "answer", **fields: object
) -> httpx.Response:
    headers = {"x-api-key": key}
    answer = await service.client.post(path, json={"do": do, **fields}, headers=headers)
    assert isinstance(answer, httpx.Response)
    return answer


async def test_answers_have_the_limits_of_their_key(tmp_path: Path) -> None:
    keys = ("alice[rpm:60+tpm:1000]=a", "bob=b", "carol[rpm:0]=c")
    async with running(tmp_path, api_key=keys, key_requests_per_minute=7) as service:
        answer = await _post(service, "a", reserves=250, uses=(40, 10))
        assert answer.headers["x-ratelimit-limit-requests"] == "60"
        assert answer.headers["x-ratelimit-remaining-requests"] == "59"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "750"
        assert answer.headers["x-ratelimit-reset-tokens"].endswith("s")
        # The reservation has become the 50 used tokens, and a second gives 17 of them.
        answer = await _post(service, "a", MESSAGES)
        assert 950 <= int(answer.headers["anthropic-ratelimit-tokens-remaining"]) < 1000
        assert answer.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        assert "x-ratelimit-limit-requests" not in answer.headers
        answer = await _post(service, "b")
        assert answer.headers["x-ratelimit-limit-requests"] == "7"
        assert "x-ratelimit-limit-tokens" not in answer.headers
        answer = await _post(service, "c")
        assert not [name for name in answer.headers if "ratelimit" in name]
        models = await service.client.get("/v1/models", headers={"x-api-key": "a"})
        assert not [name for name in models.headers if "ratelimit" in name]


async def test_a_refusal_has_the_form_of_its_api_and_an_exact_time(tmp_path: Path) -> None:
    keys = ("alice[rpm:1200+tpm:600]=a",)
    async with running(tmp_path, api_key=keys, open_metrics=True) as service:
        assert (await _post(service, "a", uses=(500, 90))).status_code == 200
        refused = await _post(service, "a", reserves=60)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "600 tokens per minute: this request reserves 60 and 1" in error["message"]
        wait_s = int(refused.headers["retry-after-ms"]) / 1000
        # 50 tokens at 10 per second.
        assert 4.5 < wait_s <= 5
        assert refused.headers["retry-after"] == "5"
        # A refused request does not count.
        assert int(refused.headers["x-ratelimit-remaining-requests"]) >= 1199
        refused = await _post(service, "a", MESSAGES, reserves=60)
        body = refused.json()
        assert (refused.status_code, body["type"]) == (429, "error")
        assert body["error"]["type"] == "rate_limit_error"
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert "retry-after" in refused.headers
        assert await service.metric('rbln_key_rejections_total{key="alice",limit="tokens"}') == 2
        assert await service.metric('rbln_admission_rejections_total{reason="key_tokens"}') == 2


async def test_requests_in_flight_are_limited_and_counted(tmp_path: Path) -> None:
    keys = ("alice=a", "bob=b")
    async with running(tmp_path, api_key=keys, key_max_in_flight=2, open_metrics=True) as service:
        waiting = [asyncio.create_task(_post(service, "a", do="wait")) for _ in range(2)]
        async with asyncio.timeout(10):
            while await service.metric('rbln_key_in_flight{key="alice"}') < 2:
                await asyncio.sleep(0.01)
        refused = await _post(service, "a")
        assert refused.status_code == 429
        assert "2 requests in flight; at most 2" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert (await _post(service, "b")).status_code == 200
        waiting.pop().cancel()
        async with asyncio.timeout(10):
            while (await _post(service, "a")).status_code == 429:
                await asyncio.sleep(0.01)
        service.frontend.go_on.set()
        await waiting[0]
        assert await service.metric('rbln_key_in_flight{key="alice"}') == 0


async def test_a_flood_of_one_key_leaves_permits_to_the_other(tmp_path: Path) -> None:
    keys = ("flood=a", "quiet=b")
    async with running(tmp_path, api_key=keys, max_in_flight=16, open_metrics=True) as service:
        flood = [asyncio.create_task(_post(service, "a", do="wait")) for _ in range(20)]
        async with asyncio.timeout(10):
            while sum(task.done() for task in flood) < 6:
                await asyncio.sleep(0.01)
        refused = [task.result() for task in flood if task.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert "the free permits are kept for other API keys" in refused[0].text
        assert await service.metric("rbln_admission_in_flight") == 14
        assert (await _post(service, "b")).status_code == 200
        service.frontend.go_on.set()
        await asyncio.gather(*flood)


async def test_limits_follow_their_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice[rpm:5]=a\n")
    async with running(tmp_path, api_key_file=file) as service:
        for _ in range(5):
            assert (await _post(service, "a")).status_code == 200
        assert (await _post(service, "a")).status_code == 429
        file.write_text("alice[rpm:6000]=a\n")
        async with asyncio.timeout(10):
            while (answer := await _post(service, "a")).status_code == 429:
                await asyncio.sleep(0.05)
        assert answer.headers["x-ratelimit-limit-requests"] == "6000"


@pytest.mark.parametrize("options", ["rpm:x", "flex+weight:0", "tpm"])
def test_a_wrong_limit_ends_the_start(options: str) -> None:
    with pytest.raises(SettingsError, match="'alice'"):
        Access(ServerSettings(api_key=(f"alice[{options}]=a",)))
