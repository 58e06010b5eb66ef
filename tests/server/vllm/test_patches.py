"""Replacements of vLLM's names: only in one module, and refused where vLLM has another shape."""

import ast
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.upstream.uses import find_uses
from server.commands.flags import get_settings, server_parser, split
from server.engine import launch
from server.errors import EngineFailedError, InternalError
from server.frontend import LaunchError
from server.lora.registry import Adapter
from server.request.endpoints import get_route
from server.request.record import RequestRecord
from server.settings import ServerSettings
from server.vllm import patches
from server.vllm.flag_table import (
    CHECKED_FLAGS,
    FULFILLED_FLAGS,
    HONOURED_FLAGS,
    REFUSED_FLAGS,
    RENAMED_FLAGS,
)
from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.server.adapter_folders import TARGETS, write_adapter
from tests.warm_process import warm_process

OF_A_REQUEST = {
    "vllm.sampling_params.SamplingParams.extra_args",
    "vllm.sampling_params.SamplingParams.structured_outputs",
    "vllm.v1.engine.EngineCoreRequest.sampling_params.seed",
    "vllm.outputs.CompletionOutput.logprobs",
}
"""Fields of one request's parameters and results, which are data."""


# In another process: other tests of this one replace names.
SCRIPT = """
import json

from pytest import MonkeyPatch
from vllm.v1.engine import output_processor

from server.frontend import LaunchError
from server.vllm import patches


def refusal():
    try:
        patches.check_shapes()
    except LaunchError as error:
        return str(error)


found = {"": refusal()}
for name in patches.SHAPES:
    with MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(name, lambda *, other: other)
        found[name] = refusal()
with MonkeyPatch.context() as monkeypatch:
    monkeypatch.delattr(output_processor.OutputProcessor, "process_outputs")
    found["gone"] = refusal()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Refusals of a start by the name whose shape is another one; "" is vLLM as it is."""
    script = tmp_path_factory.mktemp("shapes") / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = warm_process().run(environ=os.environ, script=script)
    assert not done.returncode, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_this_vllm_is_the_one_that_the_replacements_are_for(
    refusals: dict[str, str | None],
) -> None:
    assert refusals[""] is None
    assert patches.vllm_build().version == patches.VERSION


@pytest.mark.slow
@pytest.mark.parametrize("name", patches.SHAPES)
def test_a_start_is_refused_where_a_name_has_another_shape(
    refusals: dict[str, str | None], name: str
) -> None:
    refusal = refusals[name]
    assert refusal is not None
    assert name in refusal
    assert f"install vLLM {patches.VERSION}" in refusal


@pytest.mark.slow
def test_a_start_is_refused_where_a_name_is_gone(refusals: dict[str, str | None]) -> None:
    assert "OutputProcessor.process_outputs" in str(refusals["gone"])


class Theirs:
    _apply_chat_template_async = tokenizer = None


class Ours(Theirs):
    pass


def test_an_object_becomes_one_of_a_subclass_of_its_class_alone() -> None:
    theirs: Any = Theirs()
    patches.use_tokenizer_type(theirs, Ours)
    assert type(theirs) is Ours
    copied: Any = patches.adapt_serving(Theirs(), Ours, lambda parser: parser)
    assert type(copied) is Ours
    other: Any = type("Other", (), {})()
    for refuse in (
        lambda: patches.use_tokenizer_type(other, Ours),
        lambda: patches.adapt_serving(other, Ours, lambda parser: parser),
        lambda: patches.use_template_renderer(other, Ours, None),
    ):
        with pytest.raises(LaunchError, match="install vLLM"):
            refuse()


@pytest.mark.slow
def test_nothing_is_replaced_in_another_module(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "server", tmp_path / "server")
    (tmp_path / "rbln_backend").mkdir()
    (tmp_path / "server/vllm/patches.py").unlink()
    settings = ("vllm.config.", "vllm.engine.arg_utils.")
    replaced = {name for name in find_uses(tmp_path).replaced if not name.startswith(settings)}
    assert replaced <= OF_A_REQUEST
    for path in (tmp_path / "server").rglob("*.py"):
        classes = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr == "__class__"
            and isinstance(node.ctx, ast.Store)
        ]
        assert not classes, path


def test_each_name_is_compared_once_at_a_start() -> None:
    parts = (launch._ENGINE_NAMES, launch._SERVING_NAMES)
    for name in patches.SHAPES:
        assert sum(name.startswith(part) for part in parts) == 1, name


# --------------------------------------------------------------------------------------- flag table
HONOURED = [name for names in HONOURED_FLAGS.values() for name in names]
LISTS = (HONOURED, CHECKED_FLAGS, REFUSED_FLAGS, RENAMED_FLAGS, FULFILLED_FLAGS)


def test_every_flag_of_vllm_is_in_one_list() -> None:
    from server.vllm.flags import serve_parser

    parser = serve_parser()
    flags = {action.dest for action in parser._actions if action.option_strings}
    listed = [name for names in LISTS for name in names]
    own = ServerSettings.model_fields.keys() - set(listed)
    assert sorted(listed) == sorted(set(listed)), "in two lists"
    assert flags - own - set(listed) == set(), "server/vllm/flag_table.py"
    assert set(listed) - flags == set(), "no flag of this vLLM"


def test_a_refused_flag_names_what_to_use(tmp_path: Path) -> None:
    from server.vllm.flags import parse_arguments

    with pytest.raises(LaunchError, match=r"--cpu-offload-gb .*use --tensor-parallel-size"):
        parse_arguments([str(tmp_path), "--cpu-offload-gb", "4"], ServerSettings())


# -------------------------------------------------------------------------------- foreign manifests
ENDPOINTS = "--disable-access-log-for-endpoints=/health,/metrics,/v1/models"
# Of llm-d/llm-d, guides/optimized-baseline/modelserver/{gpu,npu}/vllm (the latter is Rebellions'
# own, with a shorter context), and of kserve/kserve, config/llmisvcconfig/config-llm-template.yaml,
# with its later --shutdown-timeout.
LLM_D_GPU = (ENDPOINTS, "--tensor-parallel-size=1")
LLM_D_NPU = (
    "--served-model-name=openai/gpt-oss-120b",
    ENDPOINTS,
    "--max-model-len=128",
    *"--block-size=4096 --enable-chunked-prefill --max-num-batched-tokens=512".split(),
    *"--no-enable-prefix-caching --num-gpu-blocks-override=34 --max-num-seqs=1".split(),
)
KSERVE = ("--served-model-name", "name", "--port", "8000", "--shutdown-timeout", "30")


@pytest.mark.parametrize(
    ("flags", "drain_s"),
    [(LLM_D_GPU, None), (LLM_D_NPU, None), (KSERVE, 30)],
    ids=["llm-d", "llm-d-rbln", "kserve"],
)
def test_arguments_are_taken(
    checkpoints: CheckpointCache,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    drain_s: float | None,
) -> None:
    from server.observability.logging import REQUEST_LOGGER
    from server.vllm.flags import parse_arguments

    monkeypatch.setattr(logging.getLogger(REQUEST_LOGGER), "filters", [])
    parser = server_parser("serve")
    ours, rest = split(parser, [str(checkpoints("llama")), *flags])
    settings = get_settings(parser, ours, rest)
    args = parse_arguments(rest, settings)
    assert args.port == 8000
    if drain_s is not None:
        assert settings.drain_timeout_s == drain_s


# ----------------------------------------------------------------------------------------- adapters
@dataclass
class Engine:
    """What `server.vllm.engine_client` asks of AsyncLLM, for two workers."""

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


async def opened(engine: Engine, models: Any, static: list[Any], **settings: Any) -> Any:
    from server.vllm.engine_client import open_adapters

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
    from server.vllm.engine_client import lease

    write_adapter(tmp_path / "a")
    models = served()
    adapters = await opened(Engine(), models, [], lora_root=tmp_path)
    await adapters.load("one", "a")
    assert "one" not in models.lora_requests  # nobody has asked for it
    record = RequestRecord(get_route("/v1/completions"), "POST", time.perf_counter())
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

    from server.vllm.engine_client import EngineAdapters

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
        await port.stage(Adapter("x", 1, "/x", path="/x"))
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
