"""Tiers of requests: parsing, permission, their effect on others, and the answer's field."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.errors import InvalidValueError, PermissionDeniedError
from server.request.options import Tier, granted_tier, pop_tier, tiers_of
from server.settings import SettingsError
from server.wire.endpoint import Endpoint
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
    gold = tiers_of("priority+default")
    assert [granted_tier(requested, gold) for requested in (None, "auto", "default")] == [
        *(Tier.PRIORITY, Tier.PRIORITY, Tier.DEFAULT)
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
            *(("k1", None, 200), ("k1", "priority", 200), ("k2", None, 200), ("k2", "auto", 200)),
            *(("k2", "default", 403), ("k2", "priority", 403), ("k3", "flex", 403)),
            *(("k3", "default", 200), ("k3", None, 200)),
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
        while await service.metric("rbln_admission_flex_in_flight") < 2:
            await asyncio.sleep(0.01)
        assert await service.metric("rbln_admission_in_flight") == 0
        online = [asyncio.create_task(ask(service, "", do="wait")) for _ in range(2)]
        while await service.metric("rbln_admission_in_flight") < 2:
            await asyncio.sleep(0.01)
        service.frontend.go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*flex, *online)] == [200] * 4
        for name in ("flex_in_flight", "in_flight"):
            assert await service.metric(f"rbln_admission_{name}") == 0


async def test_flex_has_its_own_limit(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=1) as service:
        body = {"do": "wait", "service_tier": "flex"}
        first = asyncio.create_task(service.client.post(CHAT, json=body))
        while await service.metric("rbln_admission_flex_in_flight") < 1:
            await asyncio.sleep(0.01)
        refused = await service.client.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "of the tier flex" in refused.json()["error"]["message"]
        # Its permit came back, too.
        assert (await ask(service, "")).status_code == 200
        service.frontend.go_on.set()
        assert (await first).status_code == 200
