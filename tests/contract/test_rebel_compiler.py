"""The rebel adapter against the documented interface of the SDK, played by a scripted stand-in.

The stand-in is a real importable package named ``rebel`` with the documented surface (backend
callable, ``CompileContext.mark_static_address``, ``get_npu_name``, ``__version__``). It runs the
graph it is given on the CPU and records how it was called. Nothing here says that an NPU works.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import fx

from rbln_backend.compiler.device import choose_device, make_rebel_compiler
from rbln_backend.compiler.port import GraphSpec, Phase
from rbln_backend.compiler.program import Program
from rbln_backend.compiler.rebel_compiler import RebelCompiler, find_sdk
from rbln_backend.config import RblnConfig
from rbln_backend.errors import CompileError, ConfigError

SDK = """
__version__ = "0.12.3"
NPU = {npu!r}

def get_npu_name(device_id=0):
    return NPU

class CompileContext:
    def __init__(self, use_weight_sharing=False, use_global_ctx=False):
        self.use_weight_sharing = use_weight_sharing
        self.static = {{}}

    def mark_static_address(self, tensor, name):
        self.static[name] = tensor
"""

BACKEND = """
CALLS = []
FAIL_WITH = None

def rbln_backend(graph, example_inputs, **kwargs):
    CALLS.append((graph, list(example_inputs), kwargs))
    if FAIL_WITH is not None:
        raise RuntimeError(FAIL_WITH)
    kwargs["options"]["_runtime_holder"].append("runtime")
    return graph.forward
"""

SPEC = GraphSpec.of(Phase.DECODE, 2)


def install_sdk(root: Path, npu: str | None) -> None:
    core = root / "rebel" / "core"
    core.mkdir(parents=True)
    (root / "rebel" / "__init__.py").write_text(SDK.format(npu=npu))
    (core / "__init__.py").write_text("")
    (core / "torch_compile.py").write_text(BACKEND)


@pytest.fixture
def sdk_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the import path; the stand-in is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name == "rebel" or name.startswith("rebel.")]:
        del sys.modules[name]


def double_and_add() -> Program:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    total = graph.call_function(torch.add, (graph.call_function(torch.mul, (x, 2)), weight))
    graph.output((total,))
    return Program(graph, ("input:x", "param:weight"))


def sdk_and_backend() -> tuple[ModuleType, ModuleType]:
    sdk = find_sdk()
    assert sdk is not None
    return sdk, sys.modules["rebel.core.torch_compile"]


def test_compiles_with_the_documented_options(sdk_root: Path) -> None:
    install_sdk(sdk_root, "RBLN-CR13")
    sdk = find_sdk()
    assert sdk is not None
    cache = torch.zeros(3)
    compiler = RebelCompiler(
        sdk,
        device="RBLN-CR13",
        cache_dir=sdk_root / "cache",
        strict=True,
        num_devices=2,
    )
    compiler.adopt_kv_caches({"layer": cache})
    x, weight = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])

    graph = compiler.load(compiler.lower(double_and_add()), SPEC, [x, weight])

    assert torch.equal(graph.run()[0], torch.tensor([12.0, 24.0]))
    x.fill_(0.0)
    assert torch.equal(graph.run()[0], weight), "the graph reads the step's buffers at every run"
    _, backend = sdk_and_backend()
    ((module, inputs, kwargs),) = backend.CALLS
    assert isinstance(module, fx.GraphModule)
    assert len(inputs) == 1, "weights are part of the module, not inputs"
    assert inputs[0] is x
    assert [name for name, _ in module.named_buffers()] == ["weight"]
    options = kwargs["options"]
    assert set(kwargs) == {"options"}
    assert options["mode"] == "strict"
    assert options["num_devices"] == 2
    assert options["process_group_dict"] == {}
    assert options["cache_dir"] == str(sdk_root / "cache")
    assert options["compile_context"].use_weight_sharing is True
    assert options["compile_context"].static["layer"] is cache
    assert options["_runtime_holder"] == ["runtime"]


def test_empty_options_are_dropped(sdk_root: Path) -> None:
    install_sdk(sdk_root, "RBLN-CA25")
    compiler = make_rebel_compiler(RblnConfig(device="rebel"), cache_dir=None)
    compiler.load(double_and_add(), SPEC, [torch.zeros(2), torch.zeros(2)])
    _, backend = sdk_and_backend()
    options = backend.CALLS[0][2]["options"]
    assert "mode" not in options
    assert "cache_dir" not in options


@pytest.mark.parametrize(
    "message", ["SYS_ENOMEM: Out of memory", "SYS_EBUSY: Lack of device memory"]
)
def test_out_of_memory_says_what_to_change(sdk_root: Path, message: str) -> None:
    install_sdk(sdk_root, "RBLN-CR13")
    compiler = make_rebel_compiler(RblnConfig(device="rebel"), cache_dir=None)
    _, backend = sdk_and_backend()
    backend.FAIL_WITH = f"init: {message} (3)"
    with pytest.raises(CompileError, match=r"decode-2.*--num-gpu-blocks-override"):
        compiler.load(double_and_add(), SPEC, [torch.zeros(2), torch.zeros(2)])


def test_other_failures_keep_their_reason(sdk_root: Path) -> None:
    install_sdk(sdk_root, "RBLN-CR13")
    compiler = make_rebel_compiler(RblnConfig(device="rebel"), cache_dir=None)
    _, backend = sdk_and_backend()
    backend.FAIL_WITH = "unsupported operator foo"
    with pytest.raises(CompileError, match=r"decode-2 failed: unsupported operator foo"):
        compiler.load(double_and_add(), SPEC, [torch.zeros(2), torch.zeros(2)])


def test_fingerprint_ignores_patch_releases(sdk_root: Path) -> None:
    install_sdk(sdk_root, "RBLN-CR13")
    fingerprint = make_rebel_compiler(RblnConfig(device="rebel"), cache_dir=None).fingerprint()
    assert fingerprint["compiler_version"] == "0.12"
    assert fingerprint["npu"] == "RBLN-CR13"


def test_an_npu_is_preferred_where_one_is_found(sdk_root: Path) -> None:
    install_sdk(sdk_root, "RBLN-CR13")
    assert choose_device(RblnConfig()) == "rebel"
    assert choose_device(RblnConfig(device="emulated")) == "emulated"


def test_an_sdk_without_npu_can_be_told_to_pretend(sdk_root: Path) -> None:
    install_sdk(sdk_root, None)
    assert choose_device(RblnConfig()) == "emulated"
    assert choose_device(RblnConfig(force_npu_name="RBLN-CR13")) == "rebel"
    with pytest.raises(ConfigError, match="RBLN_FORCE_NPU_NAME"):
        choose_device(RblnConfig(device="rebel"))


def test_without_the_sdk_rebel_is_refused_with_what_to_do() -> None:
    assert find_sdk() is None
    assert choose_device(RblnConfig()) == "emulated"
    with pytest.raises(ConfigError, match="'npu' extra"):
        choose_device(RblnConfig(device="rebel"))
