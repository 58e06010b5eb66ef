"""Adapters over HTTP, over a scripted engine: who is found, what drains, what is remembered."""

import asyncio
import json
from pathlib import Path

import httpx

from server.errors import ServerError
from server.lora.registry import State
from tests.server.adapter_folders import write_adapter
from tests.server.scripted import Running, ScriptedPort, launcher, registry, running

CHAT = "/v1/chat/completions"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
LIST = "/v1/lora_adapters"


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, str(answer.json()["error"]["code"])


async def load(service: Running, name: str, path: str = "a", **more: object) -> httpx.Response:
    return await service.client.post(LOAD, json={"lora_name": name, "lora_path": path, **more})


async def unload(service: Running, name: str) -> httpx.Response:
    return await service.client.post(UNLOAD, json={"lora_name": name})


async def states(service: Running) -> list[tuple[str, str, int]]:
    data = (await service.client.get(LIST)).json()["data"]
    return [(entry["name"], entry["state"], entry["in_flight"]) for entry in data]


async def until(service: Running, wanted: list[tuple[str, str, int]]) -> None:
    async with asyncio.timeout(5):
        while await states(service) != wanted:
            await asyncio.sleep(0.01)


async def test_load_use_and_unload(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "root" / "a")
    port = ScriptedPort()
    adapters = registry(port, tmp_path / "root")
    async with running(tmp_path, launcher(adapters)) as service:
        answer = await load(service, "org/one")
        assert answer.text == "Success: LoRA adapter 'org/one' added successfully."
        assert answer.headers["content-type"].startswith("text/plain")
        shown = (await service.client.get(f"{LIST}/org/one")).json()
        assert shown.pop("loaded_at") > 1.7e9
        assert shown == {
            "object": "lora_adapter",
            "name": "org/one",
            "state": "ready",
            "slot": 0,
            "rank": 4,
            "in_flight": 0,
            "path": str(folder),
            "lora_int_id": 1,
            "static": False,
            "error": None,
        }
        listed = (await service.client.get(LIST)).json()
        assert (listed["object"], listed["max_loras"], listed["max_lora_rank"]) == ("list", 2, 8)
        assert (await service.client.get("/v1/models/org/one")).status_code == 200
        body = {"model": "org/one", "do": "answer"}
        assert (await service.client.post(CHAT, json=body)).status_code == 200
        assert await states(service) == [("org/one", "ready", 0)]

        answer = await unload(service, "org/one")
        assert answer.text == "Success: LoRA adapter 'org/one' removed successfully."
        assert port.in_slots == {}
        assert code_of(await service.client.post(CHAT, json=body)) == (404, "model_not_found")
        for gone in (
            await unload(service, "org/one"),
            await service.client.get(f"{LIST}/org/one"),
            await service.client.delete(f"{LIST}/org/one"),
        ):
            assert code_of(gone) == (404, "not_found")


PROXIED = {"via": "1.1 gateway"}


async def test_where_adapters_lie_is_for_admins(tmp_path: Path) -> None:
    """A client without an admin key sees what is below the root, and nothing of the rest."""
    root = tmp_path / "root"
    for name in ("a", "b"):
        write_adapter(root / "team" / name)
    port = ScriptedPort()
    adapters = registry(port, root)
    await adapters.load_static("static", str(write_adapter(tmp_path / "elsewhere" / "s")), None)
    async with running(tmp_path, launcher(adapters), lora_root=root) as service:
        port.max_loras = 9
        assert (await load(service, "a", "team/a")).status_code == 200
        local = (await service.client.get(LIST)).json()["data"]
        assert all(entry["path"].startswith(str(tmp_path)) for entry in local)
        far = await service.client.get(LIST, headers=PROXIED)
        assert [entry["path"] for entry in far.json()["data"]] == ["s", "team/a"]
        assert str(tmp_path) not in far.text
        one = await service.client.get(f"{LIST}/a", headers=PROXIED)
        assert one.json()["path"] == "team/a"
        models = await service.client.get("/v1/models", headers=PROXIED)
        assert [card.get("root") for card in models.json()["data"]] == [None, "s", "team/a"]
        assert (await service.client.get("/v1/models/a", headers=PROXIED)).json()[
            "root"
        ] == "team/a"
        info = await service.client.get("/v1/server_info", headers=PROXIED)
        assert str(tmp_path) not in info.text
        assert info.json()["settings"]["server"]["lora_root"] == "."
        assert str(tmp_path) in (await service.client.get("/v1/server_info")).text


async def test_no_error_tells_where_things_lie(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = write_adapter(root / "a")
    port = ScriptedPort(unreadable=f"adapter 'x' cannot be read from {folder}: it is odd.")
    async with running(tmp_path, launcher(registry(port, root))) as service:
        for path in ("a", "../out", "none"):
            answer = await load(service, "x", path)
            assert answer.json()["error"]["code"] == "invalid_adapter"
            assert str(tmp_path) not in answer.text


async def test_without_adapters_their_routes_say_so(tmp_path: Path) -> None:
    async with running(tmp_path, launcher(None)) as service:
        for answer in (
            await load(service, "x"),
            await unload(service, "x"),
            await service.client.get(LIST),
            await service.client.get(f"{LIST}/x"),
            await service.client.delete(f"{LIST}/x"),
        ):
            assert code_of(answer) == (400, "unsupported_operation")
            assert "--enable-lora" in answer.text
    async with running(tmp_path, launcher(registry(ScriptedPort(), None))) as service:
        answer = await load(service, "x")
        assert code_of(answer) == (400, "unsupported_operation")
        assert "--lora-root" in answer.text


async def test_bodies_and_names_are_checked(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    async with running(tmp_path, launcher(registry(ScriptedPort(), tmp_path))) as service:
        for body, code, param in [
            ({"lora_path": "a"}, "missing_field", "lora_name"),
            ({"lora_name": "x"}, "missing_field", "lora_path"),
            ({"lora_name": 1, "lora_path": "a"}, "invalid_type", "lora_name"),
            ({"lora_name": "x", "lora_path": None}, "invalid_type", "lora_path"),
            ({"lora_name": "x", "lora_path": "a", "load_inplace": 1}, "invalid_type", None),
            ({"lora_name": "x", "lora_path": "a", "lora_pth": "b"}, "unknown_field", "lora_pth"),
            (
                {"lora_name": "x", "lora_path": "a", "is_3d_lora_weight": True},
                "unsupported_field",
                "is_3d_lora_weight",
            ),
            ({"lora_name": "", "lora_path": "a"}, "invalid_value", "lora_name"),
            ({"lora_name": " x", "lora_path": "a"}, "invalid_value", "lora_name"),
            ({"lora_name": "x\n", "lora_path": "a"}, "invalid_value", "lora_name"),
            ({"lora_name": "x" * 257, "lora_path": "a"}, "invalid_value", "lora_name"),
            ({"lora_name": "tiny", "lora_path": "a"}, "adapter_exists", "lora_name"),
            ({"lora_name": "x", "lora_path": "../b"}, "invalid_adapter", "lora_path"),
        ]:
            answer = await service.client.post(LOAD, json=body)
            assert code_of(answer) == (400, code), body
            assert param in (None, answer.json()["error"]["param"])
        assert await states(service) == []
        assert (await load(service, "x")).status_code == 200
        refused = 'rbln_lora_loads_total{result="refused"}'
        assert await service.metric(refused) == 6
        assert await service.metric('rbln_lora_loads_total{result="ok"}') == 1
        assert await service.metric("rbln_lora_load_seconds_count") == 1
        assert await service.metric('rbln_lora_adapters{state="ready"}') == 1
        assert await service.metric('rbln_lora_adapters{state="failed"}') == 0
        wrong = await service.client.post(UNLOAD, json={"lora_name": "x", "lora_int_id": 99})
        assert code_of(wrong) == (404, "not_found")
        wait = await service.client.delete(f"{LIST}/x?wait=perhaps")
        assert code_of(wait) == (400, "invalid_value")


async def test_names_and_slots_are_given_once(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    port = ScriptedPort(max_loras=2)
    async with running(tmp_path, launcher(registry(port, tmp_path))) as service:
        port.read.clear()
        loading = asyncio.create_task(load(service, "one"))
        await until(service, [("one", "loading", 0)])
        assert code_of(await load(service, "one")) == (400, "adapter_exists")
        body = {"model": "one", "do": "answer"}
        assert code_of(await service.client.post(CHAT, json=body)) == (404, "model_not_found")
        port.read.set()
        assert (await loading).status_code == 200
        assert code_of(await load(service, "one")) == (400, "adapter_exists")
        assert (await load(service, "two")).status_code == 200
        full = await load(service, "three")
        assert code_of(full) == (409, "no_adapter_slot")
        assert "All 2 slots" in full.text
        assert "--max-loras" in full.text
        assert (await unload(service, "one")).status_code == 200
        assert (await load(service, "three")).status_code == 200
        assert sorted(port.in_slots.values()) == [0, 1]


async def test_a_slot_is_freed_after_the_last_byte(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    port = ScriptedPort()
    async with running(tmp_path, launcher(registry(port, tmp_path))) as service:
        body = {"model": "one", "do": "wait", "stream": True}
        await load(service, "one")
        async with service.client.stream("POST", CHAT, json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await until(service, [("one", "ready", 1)])
            assert (await unload(service, "one")).status_code == 200
            assert await states(service) == [("one", "draining", 1)]
            assert code_of(await service.client.post(CHAT, json=body)) == (404, "model_not_found")
            assert code_of(await service.client.get("/v1/models/one")) == (404, "model_not_found")
            # The name is free at once, for another load with another id.
            assert (await load(service, "one")).status_code == 200
            assert await states(service) == [("one", "ready", 0), ("one", "draining", 1)]
            assert sorted(port.in_slots) == [1, 2]
            service.frontend.go_on.set()
            assert "data: [DONE]" in [line async for line in lines]
        await until(service, [("one", "ready", 0)])
        assert sorted(port.in_slots) == [2]


async def test_whoever_leaves_or_fails_gives_the_adapter_back(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    port = ScriptedPort()
    async with running(tmp_path, launcher(registry(port, tmp_path))) as service:
        await load(service, "one")
        for stream in (True, False):
            for do in ("refuse", "break"):
                body = {"model": "one", "do": do, "stream": stream}
                await service.client.post(CHAT, json=body)
            gone = asyncio.create_task(
                service.client.post(CHAT, json={"model": "one", "do": "wait", "stream": stream})
            )
            await until(service, [("one", "ready", 1)])
            gone.cancel()
            await until(service, [("one", "ready", 0)])
        assert (await service.client.delete(f"{LIST}/one")).json()["deleted"] is True
        assert port.in_slots == {}


async def test_delete_waits_or_does_not(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    port = ScriptedPort()
    async with running(tmp_path, launcher(registry(port, tmp_path))) as service:
        await load(service, "one")
        body = {"model": "one", "do": "wait"}
        waiting = asyncio.create_task(service.client.post(CHAT, json=body))
        await until(service, [("one", "ready", 1)])
        answer = await service.client.delete(f"{LIST}/one?wait=false")
        assert answer.status_code == 202
        assert answer.json()["state"] == "draining"
        deleting = asyncio.create_task(service.client.delete(f"{LIST}/one"))
        await asyncio.sleep(0.05)
        assert not deleting.done()
        service.frontend.go_on.set()
        assert (await waiting).status_code == 200
        assert (await deleting).status_code == 200
        assert port.in_slots == {}


async def test_inplace_swaps_for_new_requests_only(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    second = write_adapter(tmp_path / "b", rank=8)
    port = ScriptedPort()
    async with running(tmp_path, launcher(registry(port, tmp_path))) as service:
        await load(service, "one")
        body = {"model": "one", "do": "wait"}
        waiting = asyncio.create_task(service.client.post(CHAT, json=body))
        await until(service, [("one", "ready", 1)])
        bad = await load(service, "one", "nothing", load_inplace=True)
        assert code_of(bad) == (400, "invalid_adapter")
        assert await states(service) == [("one", "ready", 1)]
        assert (await load(service, "one", "b", load_inplace=True)).status_code == 200
        assert await states(service) == [("one", "ready", 0), ("one", "draining", 1)]
        shown = (await service.client.get(f"{LIST}/one")).json()
        assert (shown["rank"], shown["lora_int_id"], shown["path"]) == (8, 3, str(second))
        full = await load(service, "one", "a", load_inplace=True)
        assert code_of(full) == (409, "no_adapter_slot")
        service.frontend.go_on.set()
        assert (await waiting).status_code == 200
        await until(service, [("one", "ready", 0)])
        assert sorted(port.in_slots) == [3]


async def test_failures_of_the_engine_leave_no_slot_behind(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    port = ScriptedPort(max_loras=1)
    async with running(tmp_path, launcher(registry(port, tmp_path))) as service:
        port.unreadable = "tensor q has no end."
        answer = await load(service, "one")
        assert code_of(answer) == (400, "invalid_adapter")
        assert "tensor q has no end" in answer.text
        port.unreadable, port.broken = "", "add"
        assert code_of(await load(service, "one")) == (500, "internal_error")
        assert await states(service) == []
        port.broken = ""
        assert (await load(service, "one")).status_code == 200

        port.broken = "remove"
        assert code_of(await service.client.delete(f"{LIST}/one")) == (500, "internal_error")
        failed = (await service.client.get(f"{LIST}/one")).json()
        assert (failed["state"], failed["error"]) == ("failed", "remove does not work")
        assert code_of(await load(service, "two")) == (409, "no_adapter_slot")
        port.broken = ""
        assert (await service.client.delete(f"{LIST}/one")).status_code == 200
        assert (await load(service, "two")).status_code == 200


async def test_a_load_goes_on_without_its_client(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    port = ScriptedPort()
    adapters = registry(port, tmp_path)
    port.read.clear()
    asking = asyncio.create_task(adapters.load("one", "a"))
    while all(adapter.state is not State.LOADING for adapter in adapters.all()):
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait({asking})
    unloading = asyncio.create_task(adapters.unload("one", wait=True))
    await asyncio.sleep(0.02)
    assert not unloading.done()
    port.read.set()
    assert (await unloading).gone.is_set()
    assert port.in_slots == {}


async def test_loaded_adapters_survive_a_restart(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b")
    state_file = tmp_path / "state" / "adapters.json"
    state_file.parent.mkdir()
    first = registry(ScriptedPort(max_loras=4), tmp_path, state_file)
    await first.load_static("fixed", str(tmp_path / "a"), None)
    await first.load("one", "a")
    await first.load("two", "b")
    await first.load("three", "b")
    await first.unload("three", wait=True)
    written = json.loads(state_file.read_text())
    assert written["adapters"] == [{"name": "one", "path": "a"}, {"name": "two", "path": "b"}]
    assert [path.name for path in state_file.parent.iterdir()] == ["adapters.json"]

    (tmp_path / "b" / "adapter_config.json").unlink()
    port = ScriptedPort(max_loras=4)
    again = registry(port, tmp_path, state_file)
    await again.restore()
    async with running(tmp_path, launcher(again)) as service:
        assert await states(service) == [("one", "ready", 0), ("two", "failed", 0)]
        two = (await service.client.get(f"{LIST}/two")).json()
        assert "adapter_config.json is missing" in two["error"]
        assert (two["slot"], two["rank"]) == (None, None)
        body = {"model": "two", "do": "answer"}
        assert code_of(await service.client.post(CHAT, json=body)) == (404, "model_not_found")
        # A failed adapter is loaded again at the next start, until it is deleted or replaced.
        assert json.loads(state_file.read_text()) == written
        assert (await load(service, "two", "a")).status_code == 200
        assert (await unload(service, "one")).status_code == 200
    assert json.loads(state_file.read_text())["adapters"] == [{"name": "two", "path": "a"}]


async def test_a_damaged_state_file_is_put_aside(tmp_path: Path) -> None:
    state_file = tmp_path / "adapters.json"
    for content in ("{", "[]", '{"version": 9, "adapters": []}', '{"version": 1, "adapters": [1]}'):
        state_file.write_text(content)
        adapters = registry(ScriptedPort(), tmp_path, state_file)
        await adapters.restore()
        assert adapters.all() == []
        assert (tmp_path / "adapters.json.damaged").read_text() == content
    write_adapter(tmp_path / "a")
    state_file.mkdir()
    assert (await adapters.load("one", "a")).state is State.READY


async def test_any_order_of_events_keeps_the_books_right(tmp_path: Path) -> None:
    import random

    write_adapter(tmp_path / "a")
    rng = random.Random(3)
    port = ScriptedPort(max_loras=3)
    adapters = registry(port, tmp_path)
    used: list[object] = []

    async def event() -> None:
        name = rng.choice("pqrst")
        kind = rng.random()
        try:
            if kind < 0.35:
                await adapters.load(name, "a", replace=rng.random() < 0.4)
            elif kind < 0.6:
                await adapters.unload(name, wait=False)
            elif (adapter := adapters.lease(name)) is not None:
                used.append(adapter)
                for _ in range(rng.randrange(20)):
                    await asyncio.sleep(0)
                    assert adapter.id in port.in_slots
                adapters.release(adapter)
        except ServerError as error:
            assert error.code in ("adapter_exists", "not_found", "no_adapter_slot")
        held = {a.id for a in adapters.all() if a.state is not State.LOADING}
        assert held <= set(port.in_slots)

    async with asyncio.timeout(60):
        for _ in range(40):
            await asyncio.gather(*(event() for _ in range(8)))
    assert used
    for name in "pqrst":
        if any(adapter.name == name for adapter in adapters.all()):
            await adapters.unload(name, wait=True)
    assert (adapters.all(), port.in_slots, port.paths) == ([], {}, {})
