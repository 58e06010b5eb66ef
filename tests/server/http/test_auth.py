"""Keys and scopes: what opens what, where keys come from, what never shows."""

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from server.admission import NO_LIMITS
from server.errors import AuthenticationError, PermissionDeniedError, ServerError
from server.http.auth import Access, KeyRing
from server.request.endpoints import OPEN, OPENINGS, ROUTES, UNGUARDED, Route, Scope, get_route
from server.settings import ServerSettings, SettingsError, load_settings
from server.wire import Endpoint
from tests.server.scripted import Running, ScriptedLauncher, running, said

CHAT = "/v1/chat/completions"
KEY, ADMIN = "sk-alice-key", "sk-root-key"
BEARER = {"authorization": f"Bearer {KEY}"}
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}


def head(method: str = "GET", client: str = "10.0.0.9", **headers: str) -> dict[str, Any]:
    encoded = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return {"method": method, "client": (client, 1), "headers": encoded}


def verdict(access: Access, route: Route, scope: dict[str, Any]) -> str:
    try:
        return access.admit(route, scope).key or "open"
    except AuthenticationError:
        return "401"
    except PermissionDeniedError:
        return "403"


ALL_KEYS = {"api_key": (f"alice={KEY}",), "admin_key": (f"root={ADMIN}",)}
# scope: (no key, wrong key, API key, admin key) with both kinds of key set.
EXPECTED = {
    Scope.PROBE: ("open", "open", "open", "open"),
    Scope.PAGE: ("open", "open", "open", "open"),
    Scope.METRICS: ("401", "401", "alice", "root"),
    Scope.API: ("401", "401", "alice", "root"),
    Scope.ADAPTERS: ("401", "401", "403", "root"),
    Scope.ADMIN: ("401", "401", "403", "root"),
}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.template)
def test_every_route_opens_to_its_keys_alone(route: Route) -> None:
    access = Access(ServerSettings(**ALL_KEYS))  # type: ignore[arg-type]
    offers: tuple[dict[str, str], ...] = ({}, {"authorization": "Bearer wrong"}, BEARER, AS_ADMIN)
    found = tuple(verdict(access, route, head(client="127.0.0.1", **offer)) for offer in offers)
    assert found == EXPECTED[route.scope]


HOST, AFAR, PROXIED = head(client="127.0.0.1"), head(), head(client="::1", via="1.1 proxy")
API_KEYS = {"api_key": (f"alice={KEY}",)}
LOOPBACK, FLAG = {"host": "127.0.0.1"}, {"allow_unguarded_changes": True}
# settings: who may load adapters and who may drain, of (this host, afar, through a proxy).
UNGUARDED_CHANGES: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    (LOOPBACK, ("open", "403", "403"), ("open", "403", "403")),
    ({}, ("403", "403", "403"), ("403", "403", "403")),
    ({"host": "10.0.0.1"}, ("403", "403", "403"), ("403", "403", "403")),
    (FLAG, ("open", "open", "open"), ("open", "403", "403")),
    ({**LOOPBACK, **FLAG}, ("open", "open", "open"), ("open", "403", "403")),
    ({**LOOPBACK, **API_KEYS}, ("401", "401", "401"), ("open", "403", "403")),
    ({**FLAG, **API_KEYS}, ("401", "401", "401"), ("open", "403", "403")),
]


@pytest.mark.parametrize(("settings", "adapters", "drain"), UNGUARDED_CHANGES)
def test_what_changes_the_server_without_admin_keys(
    settings: dict[str, Any], adapters: tuple[str, ...], drain: tuple[str, ...]
) -> None:
    access = Access(ServerSettings(**settings))
    asking = (HOST, AFAR, PROXIED)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert tuple(verdict(access, get_route(path), who) for who in asking) == adapters
    for path in ("/admin/drain", "/admin/undrain"):
        assert tuple(verdict(access, get_route(path), who) for who in asking) == drain


def test_an_api_key_alone_changes_what_its_host_or_the_flag_allows() -> None:
    route = get_route("/v1/load_lora_adapter")
    for settings, from_afar in ((LOOPBACK, "403"), ({}, "403"), (FLAG, "alice")):
        access = Access(ServerSettings(**settings, **API_KEYS))
        assert verdict(access, route, head(**BEARER)) == from_afar
    access = Access(ServerSettings(**LOOPBACK, **API_KEYS))
    assert verdict(access, route, head(client="127.0.0.1", **BEARER)) == "alice"


def test_what_is_on_this_host() -> None:
    access, drain = Access(ServerSettings(**LOOPBACK)), get_route("/admin/drain")
    for client in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
        assert verdict(access, drain, head(client=client)) == "open"
    for name in ("x_forwarded_for", "x_forwarded_proto", "forwarded", "via", "x_real_ip", "origin"):
        assert verdict(access, drain, head(client="127.0.0.1", **{name: "127.0.0.1"})) == "403"
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert ServerSettings(host=host).listens_locally
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        assert not ServerSettings(host=host).listens_locally


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.template)
def test_the_documented_table_is_what_happens(route: Route) -> None:
    for settings, words in zip(({}, API_KEYS, ALL_KEYS), OPENINGS[route.scope], strict=True):
        access = Access(ServerSettings(**LOOPBACK, **settings))
        place, _, and_key = words.partition(", with an ")
        here = {"client": "127.0.0.1" if place == UNGUARDED else "10.0.0.9"}
        opens = {
            OPEN: {},
            UNGUARDED: BEARER if and_key else {},
            "API or admin key": BEARER,
            "admin key": AS_ADMIN,
        }[place]
        assert verdict(access, route, head(**here, **opens)) in ("open", "alice", "root")
        if place == UNGUARDED:
            assert verdict(access, route, head(client="10.0.0.9", **opens)) == "403"
        elif opens:
            assert verdict(access, route, head(client="10.0.0.9")) == "401"


def test_removing_an_adapter_is_more_than_looking_at_it() -> None:
    access = Access(ServerSettings(**ALL_KEYS))  # type: ignore[arg-type]
    route = get_route("/v1/lora_adapters/x")
    assert verdict(access, route, head("GET", **BEARER)) == "alice"
    assert verdict(access, route, head("DELETE", **BEARER)) == "403"
    only_api = Access(ServerSettings(**LOOPBACK, **API_KEYS))  # type: ignore[arg-type]
    assert verdict(only_api, route, head("DELETE", "127.0.0.1", **BEARER)) == "alice"
    assert verdict(only_api, route, head("DELETE", "127.0.0.1")) == "401"


def test_metrics_can_be_left_open() -> None:
    access = Access(ServerSettings(open_metrics=True, **ALL_KEYS))  # type: ignore[arg-type]
    assert verdict(access, get_route("/metrics"), head()) == "open"
    assert verdict(access, get_route("/v1/server_info"), head()) == "401"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (BEARER, "alice"),
        ({"authorization": f"bearer   {KEY} "}, "alice"),
        ({"x_api_key": KEY}, "alice"),
        ({"api_key": KEY}, "alice"),
        ({"authorization": "Bearer none", "x_api_key": KEY}, "alice"),
        ({"authorization": f"Basic {KEY}"}, "401"),
        ({"authorization": KEY}, "401"),
        ({"authorization": "Bearer "}, "401"),
        ({"authorization": f"Bearer {KEY}x"}, "401"),
        ({"authorization": f"Bearer {hashlib.sha256(KEY.encode()).hexdigest()}"}, "401"),
        ({"authorization": f"Bearer sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"}, "401"),
    ],
)
def test_where_a_key_may_stand(headers: dict[str, str], expected: str) -> None:
    access = Access(ServerSettings(**ALL_KEYS))  # type: ignore[arg-type]
    assert verdict(access, get_route(CHAT), head(**headers)) == expected


def ring(*given: str, file: Path | None = None) -> KeyRing:
    return KeyRing("api", [SecretStr(text) for text in given], file, b"salt", NO_LIMITS)


def get_key_name(keys: KeyRing, key: str) -> str | None:
    found = keys.find([hashlib.sha256(key.encode()).digest()])
    return None if found is None else found.name


def test_forms_of_a_key() -> None:
    digest = hashlib.sha256(b"hidden").hexdigest()
    keys = ring("plain", "bob=word", "c2VjcmV0==", f"dan=sha256:{digest}", f"sha256:{digest}")
    assert get_key_name(keys, "plain") == "api-1"
    assert get_key_name(keys, "word") == "bob"
    assert get_key_name(keys, "c2VjcmV0==") == "api-3"
    assert get_key_name(keys, "bob=word") is None
    assert get_key_name(keys, "hidden") is not None
    assert get_key_name(
        ring("q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA="),
        "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=",
    )
    with pytest.raises(SettingsError, match=r"--api-key \(RBLN_SERVE_API_KEY\).* 'bob' is empty"):
        ring("bob=")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        ("a=b\nsk-secret-line\n", "line 2"),
        ("a b=c\n", "line 1"),
        ("a=sha256:1234\n", "64 hex digits"),
    ],
)
def test_a_key_file_that_is_wrong_says_where_and_not_what(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingsError, match=words) as caught:
        ring(file=file)
    assert "sk-secret" not in str(caught.value)
    with pytest.raises(SettingsError, match="nowhere"):
        ring(file=tmp_path / "nowhere")


async def test_a_key_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("# two for the change-over\nalice=old\nalice=new\n")
    async with running(tmp_path, api_key_file=file) as service:

        async def code(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            answer = await service.client.get("/v1/models", headers=headers)
            return answer.status_code

        async def until(key: str, status: int) -> None:
            async with asyncio.timeout(10):
                while await code(key) != status:
                    await asyncio.sleep(0.05)

        assert [await code(key) for key in ("old", "new", "next")] == [200, 200, 401]
        file.write_text("alice=new\nbob=next\n")
        await until("old", 401)
        assert [await code(key) for key in ("new", "next")] == [200, 200]
        for bad in ("", "nonsense"):
            caplog.clear()
            file.write_text(bad)
            await said(caplog, "Kept the previous keys")
            assert [await code(key) for key in ("new", "old")] == [200, 401]
        caplog.clear()
        file.unlink()
        await said(caplog, "Kept the previous keys")
        assert await code("new") == 200
        # Swapped in one go, as orchestrators do.
        (tmp_path / "fresh").write_text("carol=third\n")
        (tmp_path / "fresh").rename(file)
        await until("third", 200)
        assert await code("new") == 401


def test_a_key_file_must_be_a_regular_file_of_bounded_size(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    # Cut at 1 MiB, the last key would be a prefix of itself.
    large.write_text("# padding\n" * 110_000 + "alice=key\n")
    for path, words in ((pipe, "not a regular"), (tmp_path, "not a reg"), (large, "larger than")):
        with pytest.raises(SettingsError, match=words):
            ring(file=path)


async def test_a_key_file_that_becomes_a_pipe_blocks_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice={KEY}\n")
    async with running(tmp_path, api_key_file=file) as service:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").rename(file)
        await said(caplog, "not a regular file")
        assert (await service.client.get("/v1/models", headers=BEARER)).status_code == 200


_HANG = """
import asyncio, threading, time
from server.host.tasks import in_thread
async def main():
    asyncio.ensure_future(in_thread(threading.Event().wait))
    await asyncio.sleep(0.1)
asyncio.run(main())
"""


def test_a_file_system_that_hangs_does_not_hold_the_exit() -> None:
    subprocess.run([sys.executable, "-c", _HANG], timeout=20, check=True)


async def test_refusals_come_before_readiness_and_before_the_body(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()

    async def body() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    async with running(tmp_path, launcher, **ALL_KEYS) as service:
        answer = await service.client.post(CHAT, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
        answer = await service.client.post(CHAT, json={}, headers=BEARER)
        assert answer.json()["error"]["code"] == "not_ready"
        assert (await service.client.get("/readyz")).status_code == 503
        assert (await service.client.get("/nope")).status_code == 401
        assert (await service.client.post("/v1/messages", json={})).json()["type"] == "error"
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n{")
        async with asyncio.timeout(5):
            assert b"401" in await reader.readline()
        writer.close()
        launcher.launched.set()


async def test_a_drain_without_admin_key_is_for_this_host(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        far = {"x-forwarded-for": "127.0.0.1"}
        answer = await service.client.post("/admin/drain", headers=far)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        assert "--admin-key" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "NO API KEY: whoever reaches 0.0.0.0:8000 may use the model"),
        ({"host": "0.0.0.0", **FLAG}, "and load and unload adapters"),
        ({"host": "0.0.0.0", **API_KEYS}, None),
        (LOOPBACK, None),
    ],
)
async def test_an_open_server_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], words: str | None
) -> None:
    async with running(tmp_path, ScriptedLauncher(), **settings):
        await asyncio.sleep(0.1)
    said = [record.getMessage() for record in caplog.records if "NO API KEY" in record.getMessage()]
    assert len(said) == (words is not None)
    assert words is None or (words in said[0] and "--api-key-file" in said[0])


async def test_secrets_never_show(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path, **ALL_KEYS) as service:
        texts = [
            (await service.client.get("/v1/server_info", headers=AS_ADMIN)).text,
            (await service.client.get("/metrics", headers=AS_ADMIN)).text,
            (
                await service.client.get("/v1/models", headers={"authorization": "Bearer xyzzy"})
            ).text,
        ]
    for text in (*texts, caplog.text, repr(ServerSettings(**ALL_KEYS))):
        for secret in (KEY, ADMIN, "xyzzy"):
            assert secret not in text


async def test_usage_is_counted_by_key(tmp_path: Path) -> None:
    async with running(tmp_path, **ALL_KEYS) as service:
        client = service.client
        await client.post(CHAT, json={"do": "answer", "uses": [5, 3]}, headers=BEARER)
        await client.post(
            CHAT, json={"do": "answer", "stream": True, "uses": [7, 2]}, headers=BEARER
        )
        await client.post(CHAT, json={"do": "refuse"}, headers=BEARER)
        await client.post(CHAT, json={"do": "answer"})
        await client.get("/readyz", headers=BEARER)
        client.headers.update(AS_ADMIN)
        assert await service.metric('rbln_key_requests_total{key="alice",outcome="ok"}') == 2
        counted = 'rbln_key_requests_total{key="alice",outcome="client_error"}'
        assert await service.metric(counted) == 1
        assert await service.metric('rbln_key_tokens_total{key="alice",kind="prompt"}') == 12
        assert await service.metric('rbln_key_tokens_total{key="alice",kind="completion"}') == 5
        page = (await client.get("/metrics")).text
        assert {
            line.split('key="')[1].split('"')[0] for line in page.splitlines() if 'key="' in line
        } == {"alice", "root"}


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from,vllm")
    assert [key.get_secret_value() for key in load_settings({}, {}).api_key] == ["from,vllm"]
    monkeypatch.setenv("RBLN_SERVE_API_KEY", "one,two=2")
    assert [k.get_secret_value() for k in load_settings({}, {}).api_key] == ["one", "two=2"]
    flags = {"api_key": ["flag"]}
    assert [key.get_secret_value() for key in load_settings(flags, {}).api_key] == ["flag"]


def test_every_error_of_access_is_in_the_table() -> None:
    assert issubclass(AuthenticationError, ServerError)
    assert {route.template for route in ROUTES} >= {endpoint.value for endpoint in Endpoint}
    assert httpx.codes(AuthenticationError("x").status) is httpx.codes.UNAUTHORIZED


# --------------------------------------------------------------------------------------- key limits
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
            await service.until('rbln_key_in_flight{key="alice"}', 2)
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
