"""The adapter of the SDK, graph by graph, over the double."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.devices.rebel.compiler import RebelCompiler
from rbln_backend.devices.rebel.limits import Npu
from rbln_backend.devices.rebel.modules import module_of
from rbln_backend.errors import CompileError, ConfigError, UnsupportedModelError
from rbln_backend.graphs.operators import PASSED, check_ops
from rbln_backend.graphs.program import Program

SPEC = GraphSpec.of(Phase.DECODE, 2)
CR13 = Npu.named("RBLN-CR13")


def double_and_add() -> Program:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    total = graph.call_function(torch.add, (graph.call_function(torch.mul, (x, 2)), weight))
    graph.output((total,))
    return Program(graph, ("input:x", "param:weight"))


def tensors() -> list[Tensor]:
    return [torch.tensor([1.0, 2.0]), nn.Parameter(torch.tensor([10.0, 20.0]), requires_grad=False)]


class Backend:
    """Stands before the double's backend and keeps what it was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[fx.GraphModule, list[Tensor], dict[str, Any]]] = []
        self.failure: str | None = None
        module = sys.modules["rebel.core.torch_compile"]
        self._next = module.rbln_backend
        monkeypatch.setattr(module, "rbln_backend", self)

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        self.calls.append((module, list(inputs), options["options"]))
        assert torch._guards.TracingContext.try_get() is not None
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return self._next(module, inputs, **options)


@pytest.fixture
def backend(sdk: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Backend:
    assert sdk is sys.modules["rebel"]
    return Backend(monkeypatch)


def make(sdk: ModuleType, **options: Any) -> RebelCompiler:
    return RebelCompiler(sdk, **{"npu": CR13, "cache_dir": None, "strict": True, **options})


def test_a_graph_is_handed_over_as_the_vendor_does(
    sdk: ModuleType, backend: Backend, tmp_path: Path
) -> None:
    compiler = make(sdk, cache_dir=tmp_path / "rank0")
    x, weight = tensors()
    graph = compiler.load(compiler.lower(double_and_add()), SPEC, [x, weight])
    assert torch.equal(graph.run()[0], torch.tensor([12.0, 24.0]))
    x.fill_(0.0)
    assert torch.equal(graph.run()[0], weight), "a run reads the step's own buffers"
    ((module, inputs, options),) = backend.calls
    assert inputs[0] is x
    assert inputs[1] is weight, "a parameter: the SDK tells weights by it"
    assert options["mode"] == ["strict"]
    assert options["num_devices"] == 1
    assert options["use_static_output"] is True
    assert (options["cache_dir"], options["mega_cache_only"]) == (str(tmp_path / "rank0"), True)
    assert options["compile_context"].use_weight_sharing
    assert options["compile_context"].use_global_ctx
    assert len(options["_runtime_holder"]) == 1
    assert "model_trace_method" not in options
    values = [n.meta["example_value"] for n in module.graph.nodes if n.op == "call_function"]
    assert [tuple(value.shape) for value in values] == [(2,), (2,)]


def test_a_weight_has_one_name_in_every_graph_cold_and_warm(
    sdk: ModuleType, backend: Backend
) -> None:
    compiler, (x, weight) = make(sdk), tensors()
    other = fx.Graph()
    first, second, third = (other.placeholder(name) for name in ("bias", "x", "w"))
    other.output(
        (other.call_function(torch.add, (other.call_function(torch.add, (first, second)), third)),)
    )
    programs = [
        double_and_add(),
        Program(other, ("param:bias", "input:x", "param:weight")),
        Program.from_bytes(double_and_add().to_bytes()),
    ]
    bias = nn.Parameter(torch.ones(2), requires_grad=False)
    for program in programs:
        bound = {"input:x": x, "param:weight": weight, "param:bias": bias}
        compiler.load(program, SPEC, [bound[name] for name in program.bindings])
    names = [[n.name for n in m.graph.nodes if n.op == "placeholder"] for m, _, _ in backend.calls]
    assert [name[-1] for name in names] == ["l_self_model_parameters_weight_"] * 3
    assert names[0] == names[2]


def test_weights_are_told_from_what_steps_and_requests_bring(
    sdk: ModuleType, backend: Backend
) -> None:
    """On a cold start Dynamo has marked what it captured of modules, on a warm one nothing."""
    bindings = ("input:x", "param:weight", "param:table", "scale:layer", "lora:a")
    starts = []
    for is_cold in (True, False):
        x, weight = tensors()
        values = [x, weight, *(torch.ones(2) for _ in range(3))]
        for value in values if is_cold else ():
            torch._dynamo.mark_static_address(value)
        graph = fx.Graph()
        first, *others = (graph.placeholder(name.replace(":", "_")) for name in bindings)
        for other in others:
            first = graph.call_function(torch.add, (first, other))
        graph.output((first,))
        compiler = make(sdk)
        program = compiler.lower(Program(graph, bindings))
        compiler.load(program, SPEC, values)
        module, found, _ = backend.calls[-1]
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        # What torch's own ahead-of-time compiler would hold fixed.
        _, fixed = _try_get_metadata_from_dynamo(module, {}.keys(), len(bindings), [])
        assert fixed == [1, 2, 3]
        assert [hasattr(x, "_dynamo_static_input_type") for x in found] == [
            number in fixed for number in range(len(bindings))
        ]
        starts.append(
            [
                (node.name, node.target, node.meta["tensor_dict"], node.meta["grapharg"].source)
                for node in nodes
            ]
            + [(module.code, module.meta["dynamo_compile_id"], None, None)]
        )
    assert starts[0] == starts[1]


def test_names_that_read_alike_stay_apart() -> None:
    names = ["param:a.b_c", "param:a_b.c", "param:a.b.c", "scale:a.b.c", "kv:a.b.c", "lora:a.b.c"]
    bindings = (*names, "input:a")
    graph = fx.Graph()
    graph.output(tuple(graph.placeholder(f"x{number}") for number in range(len(bindings))))
    module = module_of(Program(graph, bindings), [torch.ones(1)] * len(bindings), None)
    names = [node.target for node in module.graph.nodes if node.op == "placeholder"]
    assert names == [
        "L_self_model_modules_a_buffers_b_c_",
        "L_self_model_modules_a_b_buffers_c_",
        "L_self_model_modules_a_modules_b_buffers_c_",
        "L_self_model_modules_a_modules_b_modules_c_impl_scale",
        "L_kv_a_b_c_",
        "L_lora_a_b_c_",
        "L_a_",
    ]


def test_a_host_without_an_npu_only_compiles(sdk: ModuleType, backend: Backend) -> None:
    make(sdk, has_device=False).load(double_and_add(), SPEC, tensors())
    assert backend.calls[0][2]["mode"] == ["strict", "compile_only"]


def test_falling_back_to_the_cpu_needs_a_setting(sdk: ModuleType, backend: Backend) -> None:
    make(sdk, strict=False).load(double_and_add(), SPEC, tensors())
    assert backend.calls[0][2]["mode"] == []


@pytest.mark.parametrize(
    "message", ["SYS_ENOMEM: Out of memory", "SYS_EBUSY: Lack of device memory"]
)
def test_out_of_memory_says_what_to_change(sdk: ModuleType, backend: Backend, message: str) -> None:
    backend.failure = f"init: {message} (3)"
    with pytest.raises(CompileError, match=r"decode-2.*--num-gpu-blocks-override"):
        make(sdk).load(double_and_add(), SPEC, tensors())


def test_other_failures_keep_their_reason(sdk: ModuleType, backend: Backend) -> None:
    backend.failure = "unsupported operator foo"
    with pytest.raises(CompileError, match=r"decode-2 failed: unsupported operator foo"):
        make(sdk).load(double_and_add(), SPEC, tensors())


def test_what_changes_a_binary_is_in_the_fingerprint(sdk: ModuleType) -> None:
    fingerprint = make(sdk).fingerprint()
    assert fingerprint["compiler_version"] == "0.12", "patch releases are alike"
    assert fingerprint["npu"] == "RBLN-CR13"
    assert fingerprint != make(sdk, strict=False).fingerprint()


def test_one_rank_has_one_rebel_npu(sdk: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"num_devices_per_local_rank=2.*RBLN-CR13"):
        make(sdk, num_devices=2)


def test_caches_are_named_and_never_in_host_memory(sdk: ModuleType, backend: Backend) -> None:
    memory = make(sdk).kv_memory
    cache = memory.allocate("layer.0", (4, 2, 1, 1, 512, 32), torch.float32)
    assert cache.device.type == "meta"


def test_binaries_go_from_one_process_to_another(
    sdk: ModuleType, backend: Backend, tmp_path: Path
) -> None:
    compiler = make(sdk, cache_dir=tmp_path / "rank0")
    compiler.load(double_and_add(), SPEC, tensors())
    data = compiler.write_binaries()
    assert data
    assert make(sdk, cache_dir=tmp_path / "other").read_binaries(data)
    assert not make(sdk, cache_dir=tmp_path / "other").read_binaries(b"something else")
    assert make(sdk).write_binaries() is None, "the cache is off"


def test_the_ops_are_there_as_they_are_called(sdk: ModuleType) -> None:
    assert sdk is not None
    check_ops(*PASSED)


def test_an_op_that_is_missing_or_differs_is_named(
    sdk: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sdk is not None
    monkeypatch.setitem(PASSED, "no_such_op", "Tensor q")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"rbln_custom_ops::no_such_op is missing"):
        check_ops("no_such_op")
    form = PASSED["custom_moe_glu"]
    monkeypatch.setitem(PASSED, "custom_moe_glu", form.replace("str hidden_act", "int hidden_act"))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"takes str as argument 5 .*, int is passed"):
        check_ops("custom_moe_glu")
    monkeypatch.setitem(PASSED, "custom_moe_glu", f"{form}, int more")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"takes 10 arguments, 11 are passed"):
        check_ops("custom_moe_glu")
    monkeypatch.setitem(PASSED, "custom_moe_glu", "Tensor hidden_states")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"wants \w+, which is not passed"):
        check_ops("custom_moe_glu")
