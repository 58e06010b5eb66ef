"""The registry over an engine that answers as vLLM's does: start, lookups, faults, flags."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.errors import EngineFailedError, InternalError
from server.frontend import LaunchError
from server.lora.registry import EngineAdapter
from server.request.endpoints import route_of
from server.request.record import RequestRecord
from server.settings import ServerSettings
from tests.server.adapter_folders import TARGETS, write_adapter

pytestmark = pytest.mark.engine


@dataclass
class Engine:
    """What `server.vllm.adapters` asks of AsyncLLM, for two workers."""

    lora_config: Any = field(default_factory=lambda: SimpleNamespace(max_loras=2, max_lora_rank=8))
    in_slots: dict[int, int] = field(default_factory=dict)
    states: list[list[str]] = field(default_factory=lambda: [["ready", ""], ["ready", ""]])
    error: Exception | None = None

    @property
    def vllm_config(self) -> Any:
        return SimpleNamespace(lora_config=self.lora_config)

    @property
    def model_config(self) -> Any:
        return SimpleNamespace(model="/models/Tiny")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if self.error is not None:
            raise self.error
        targets = {name: [target.shapes, target.experts] for name, target in TARGETS.items()}
        answers = {"lora_targets": targets, "lora_slots": self.in_slots, "stage_lora": None}
        return self.states if method == "staged_lora" else [answers[method]] * 2

    async def add_lora(self, request: Any) -> bool:
        free = {0, 1} - set(self.in_slots.values())
        self.in_slots[request.lora_int_id] = min(free)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return self.in_slots.pop(lora_id, None) is not None


def served() -> Any:
    return SimpleNamespace(base_model_paths=[SimpleNamespace(name="tiny")], lora_requests={})


def module(name: str, path: Path, base: str | None = None, is_3d: bool = False) -> Any:
    return SimpleNamespace(name=name, path=str(path), base_model_name=base, is_3d_lora_weight=is_3d)


def a_request() -> RequestRecord:
    return RequestRecord(route_of("/v1/completions"), "POST", time.perf_counter())


async def opened(engine: Engine, models: Any, static: list[Any], **settings: Any) -> Any:
    from server.vllm.adapters import open_adapters

    return await open_adapters(engine, models, static, ServerSettings(**settings))  # type: ignore[arg-type]


async def test_adapters_of_the_command_line_and_of_before_a_restart(tmp_path: Path) -> None:
    write_adapter(tmp_path / "root" / "a")
    fixed = write_adapter(tmp_path / "elsewhere")
    first, models = Engine(), served()
    adapters = await opened(first, models, [module("fixed", fixed)], lora_root=tmp_path / "root")
    await adapters.load("one", "a")
    assert (tmp_path / "root" / "adapters.json").exists()
    assert [request.lora_name for request in models.lora_requests.values()] == ["fixed", "one"]

    again = Engine(lora_config=SimpleNamespace(max_loras=1, max_lora_rank=8))
    restarted = await opened(again, served(), [module("fixed", fixed)], lora_root=tmp_path / "root")
    assert [(a.name, a.state.value) for a in restarted.all()] == [
        ("fixed", "ready"),
        ("one", "failed"),
    ]
    assert "All 1 slots" in restarted.get("one").error
    assert again.in_slots == {1: 0}
    assert await opened(Engine(lora_config=None), served(), []) is None


async def test_vllm_finds_what_the_request_has_a_lease_of(tmp_path: Path) -> None:
    from server.vllm.adapters import lease

    write_adapter(tmp_path / "a")
    models = served()
    adapters = await opened(Engine(), models, [], lora_root=tmp_path)
    await adapters.load("one", "a")
    assert "one" not in models.lora_requests  # nobody has asked for it
    record = a_request()
    assert not lease(adapters, "two", record)
    assert lease(adapters, "one", record)
    await adapters.load("one", "a", replace=True)
    found = models.lora_requests["one"]
    assert (found.lora_int_id, found.lora_path) == (1, str(tmp_path / "a"))
    assert "two" not in models.lora_requests
    await adapters.unload("one", wait=True)
    # Its name is gone, and the request still finds what it began with.
    assert models.lora_requests["one"].lora_int_id == 1
    assert [adapter.in_flight for adapter in adapters.all()] == [1]
    for end in record.on_end:
        end()
    await adapters.all()[0].gone.wait()
    assert adapters.all() == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"path": Path("/nowhere")}, "--lora-modules x: The adapter cannot be loaded: '/nowhere'"),
        ({"is_3d": True}, "is_3d_lora_weight"),
        ({"base": "other"}, "base_model_name is 'other', and the served model is 'tiny'"),
        ({"name": "tiny"}, "is the name of the served model"),
    ],
)
async def test_an_adapter_of_the_command_line_ends_the_start(
    tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    folder = write_adapter(tmp_path / "a", config={"base_model_name_or_path": "unknown"})
    good: dict[str, Any] = {"name": "x", "path": folder, "base": "tiny"}
    assert (await opened(Engine(), served(), [module(**good)])).get("x").state.value == "ready"
    with pytest.raises(LaunchError) as caught:
        await opened(Engine(), served(), [module(**good | wrong)])
    assert words in str(caught.value)


async def test_where_the_state_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = tmp_path / "no" / "file"
    with pytest.raises(LaunchError, match=r"--lora-state-file: .* cannot be written"):
        await opened(Engine(), served(), [], lora_root=tmp_path, lora_state_file=missing)
    # Whoever runs the tests may write everywhere, but not over a folder.
    (tmp_path / "adapters.json").mkdir()
    adapters = await opened(Engine(), served(), [], lora_root=tmp_path)
    assert "are forgotten at a restart" in caplog.text
    assert adapters.all() == []


async def test_faults_of_the_engine_are_translated() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from server.vllm.adapters import EngineAdapters

    engine = Engine()
    port = EngineAdapters(engine)  # type: ignore[arg-type]
    for states, expected in [
        ([["ready", ""], ["reading", ""]], ("reading", "")),
        ([["reading", ""], ["failed", "why"]], ("failed", "why")),
    ]:
        engine.states = states
        assert await port.staged(1) == expected
    engine.error = EngineDeadError()
    with pytest.raises(EngineFailedError):
        await port.stage(EngineAdapter("x", 1, "/x"))
    engine.error = Exception("Call to stage_lora method failed")
    with pytest.raises(InternalError):
        await port.slots()


@pytest.mark.parametrize(
    ("argv", "settings", "words"),
    [
        ([], {"lora_root": "/tmp"}, "--lora-root needs --enable-lora"),
        ([], {"lora_base_names": ["x"]}, "--lora-base-names needs --enable-lora"),
        (["--lora-modules", "a=/b"], {}, "--lora-modules needs --enable-lora"),
        (["--enable-lora"], {"lora_root": "/no/such"}, "there is no directory '/no/such'"),
        (["--enable-lora"], {"lora_state_file": "/tmp/x"}, "--lora-state-file needs --lora-root"),
        (["--default-mm-loras", '{"audio": "/x"}'], {}, "--default-mm-loras cannot be used"),
    ],
)
def test_flags_without_effect_are_refused(
    argv: list[str], settings: dict[str, Any], words: str
) -> None:
    from server.vllm.flags import parse_arguments

    with pytest.raises(LaunchError) as caught:
        parse_arguments(["m", *argv], ServerSettings(**settings))
    assert caught.value.exit_code == 2
    assert words in str(caught.value)
