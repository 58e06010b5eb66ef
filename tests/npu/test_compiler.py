"""The adapter of the SDK, graph by graph, over the double."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from rbln_backend.core import GraphSpec, Phase, StepOutputs
from rbln_backend.devices.rebel.compiler import RebelCompiler
from rbln_backend.devices.rebel.limits import Npu
from rbln_backend.devices.rebel.modules import get_module
from rbln_backend.errors import CompileError, ConfigError, UnsupportedModelError
from rbln_backend.graphs.operators import PASSED, check_ops
from rbln_backend.graphs.program import Program
from rbln_backend.models.token_axes import keep_axes
from rbln_backend.worker.check import inspect_model
from rbln_backend.worker.device_sampler import DeviceSampler
from rbln_backend.worker.graph_factory import GraphListener, GraphRequest
from rbln_backend.worker.inputs import DecodeRows, LongestFirst
from rbln_backend.worker.memory import rank_memory
from rbln_backend.worker.preflight import planned_graphs, sampler_graphs
from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, THREE_CHUNKS, TWO_BLOCKS, Job, Ran, run
from tests.npu.test_engines import LONG

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
    module = get_module(Program(graph, bindings), [torch.ones(1)] * len(bindings), None)
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


# --------------------------------------------------------------------------------------- token axes
# Models whose classes take rows of tokens, over the double, whose rule ``axes`` refuses rows.


FAMILIES = (
    # Norms of heads see rows; a gate and experts.
    "glm4_moe",
    # vLLM's Transformers backend, which makes one sequence of all requests.
    "olmo2",
)
OTHERS = (
    *"cohere deepseek_v2 dots1 ernie4_5_moe exaone4 falcon_new gemma3_text".split(),
    *"glm4 gpt2 gptj gpt_neox granitemoe helium mixtral nemotron opt".split(),
    *"persimmon phi3 qwen2_moe qwen3 stablelm".split(),
)


def jobs_of(names: tuple[str, ...], checkpoints: CheckpointCache) -> list[Job]:
    """Requests of several lengths together, so that batches have more than one row."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return [
        Job(
            checkpoints(name, **LONG, **(latent if name.startswith("deepseek") else {})),
            batches=[[ONE_CHUNK, THREE_CHUNKS]],
            max_tokens=4,
        )
        for name in names
    ]


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names", [FAMILIES, pytest.param(OTHERS, marks=pytest.mark.wide)], ids=["two", "others"]
)
def test_answers_are_those_of_transformers(
    names: tuple[str, ...], checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    jobs = jobs_of(names, checkpoints)
    ran: Ran = run(jobs, tmp_path)
    assert dict(zip(names, ran.answers, strict=True)) == {
        name: job.expected() for name, job in zip(names, jobs, strict=True)
    }
    assert ran.calls("broken") == []


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_layer_that_splits_rows_is_refused(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"self_attn: attention that splits rows of tokens"):
        run(jobs_of(("minicpm3",), checkpoints), tmp_path)


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rotated", [16, 8], ids=["all", "part"])
@pytest.mark.parametrize("is_halved", [True, False], ids=["halves", "pairs"])
def test_heads_are_turned_as_by_vllm(*, is_halved: bool, rotated: int) -> None:
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(16, rotated, 64, 10000.0, is_halved, torch.float32)
    positions, q, k = torch.randint(64, (2, 3)), torch.randn(2, 3, 4 * 16), torch.randn(2, 3, 16)
    rows = (x.flatten(0, 1) for x in (q, k))
    expected = layer.forward_native(positions.flatten(), *rows)
    keep_axes(nn.ModuleList([layer]))
    for found, wanted in zip(layer(positions, q, k), expected, strict=True):
        assert torch.equal(found.flatten(0, 1), wanted)
    # As the vendor's: a cosine and a sine for each number of a head.
    assert layer.cos_cache.shape == layer.sin_cache.shape == (64, rotated)


# ------------------------------------------------------------------------------------------ windows
# Sliding windows on an NPU: prefixes of windows in pages are reused, those of shifted ones not.


LONG_SHARED = TWO_BLOCKS[:1300] + ONE_CHUNK
"""Its hit of 1,280 tokens ends 256 tokens behind the first block."""


def window_job(checkpoints: CheckpointCache, window: int) -> Job:
    path = checkpoints("mistral", max_position_embeddings=4096, sliding_window=window)
    return Job(path, batches=[[TWO_BLOCKS], [LONG_SHARED]])


# The window of the hit reaches into its first block, or lies in the second alone.
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", [300, pytest.param(200, marks=pytest.mark.wide)])
def test_prefixes_of_windows_in_pages_are_reused(
    checkpoints: CheckpointCache, tmp_path: Path, window: int
) -> None:
    job = window_job(checkpoints, window)
    cold = run([job], tmp_path)
    assert cold.answers == [job.expected()]
    assert [call["tokens"] for call in cold.calls("copy_kv")] == [256]
    broken = run([job], tmp_path, **{"break": ["kv_copy"]})
    assert all(call["hit"] for call in broken.calls("compile"))
    assert broken.answers[0][0] == job.expected()[0]
    assert broken.answers[0][1] != job.expected()[1], "the second answer needs the copy"


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.wide
def test_prefixes_of_shifted_windows_are_not(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    job = window_job(checkpoints, 300)
    ran = run([job], tmp_path, npu="RBLN-CR03")
    assert ran.answers == [job.expected()]
    assert ran.calls("copy_kv") == []


# ------------------------------------------------------------------------------------- sampler plan
# Graphs that draw tokens: in the plan, in the report and in the memory; and what is refused.


@pytest.fixture
def torch_rbln(sdk: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, which is all that a configuration looks at."""
    assert sdk
    (tmp_path / "torch_rbln.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))


def config_of(checkpoint: Path, *, rbln: dict[str, Any], **options: Any) -> VllmConfig:
    settings = {"device": "rebel", "sample_on_device": True} | rbln
    sizes = {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    return EngineArgs(
        str(checkpoint), **(sizes | options), additional_config={"rbln": settings}
    ).create_engine_config()


@pytest.mark.usefixtures("torch_rbln")
def test_graphs_that_draw_are_counted(checkpoints: CheckpointCache) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    with_them = config_of(checkpoint, rbln={})
    without = config_of(checkpoint, rbln={"sample_on_device": False})
    assert list(map(str, sampler_graphs(with_them, planned_graphs(with_them)))) == [
        "sample-1",
        "sample-2",
        "sample-4",
    ]
    npu = Npu.named("RBLN-CR13")
    counts = [rank_memory(npu, config).num_graphs for config in (with_them, without)]
    assert counts[0] - counts[1] == 3
    for config in (with_them, without):
        # As with --max-model-len auto: the stored graphs are not compared, which needs the device.
        config.model_config.original_max_model_len = -1
    report = dict(inspect_model(with_them).lines())
    assert report["graphs"] == f"{counts[1]}, and 3 that draw tokens, compiled by every start"
    assert dict(inspect_model(without).lines())["graphs"] == str(counts[1])


@pytest.mark.usefixtures("torch_rbln")
@pytest.mark.parametrize(
    ("rbln", "options", "setting"),
    [
        ({"device": "emulated"}, {}, "device 'emulated'"),
        ({"use_device_tensor": False}, {}, "device 'rebel' without torch-rbln"),
        ({"sampler": False}, {}, "VLLM_RBLN_SAMPLER=0"),
        ({"enable_warm_up": False}, {}, "VLLM_RBLN_ENABLE_WARM_UP=0"),
        ({}, {"runner": "pooling"}, "--runner pooling"),
        ({}, {"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ],
)
def test_other_engines_are_refused(
    checkpoints: CheckpointCache, rbln: dict[str, Any], options: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ValueError, match=f"sample_on_device with {setting}"):
        config_of(checkpoints("llama", max_position_embeddings=4096), rbln=rbln, **options)


# ------------------------------------------------------------------------------------- sampler rows
# Parameters and tokens of requests whose rows the device has in another order.


ROWS, VOCAB = 4, 64


class EagerGraph:
    """A function that runs on its inputs, without a compiler."""

    def __init__(
        self, request: GraphRequest, function: Callable[..., Any], names: Sequence[str]
    ) -> None:
        self.spec = request.spec
        self._inputs: Mapping[str, Tensor] = request.inputs
        self._function, self._names = function, names

    def run(self, useful: object = None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._function(*(self._inputs[n] for n in self._names))
        return outputs

    def run_over(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        self._inputs = {**self._inputs, name: tensor}
        return self.run()

    def prepare(self) -> None:
        """Nothing is to be done."""


@pytest.fixture
def sampler(sdk: ModuleType) -> DeviceSampler:
    assert sdk
    spec = GraphSpec.of(Phase.DECODE, ROWS)
    model = EagerGraph(
        GraphRequest(spec, {"x": torch.zeros(ROWS, VOCAB)}, None), lambda x: (x,), ["x"]
    )
    made = DeviceSampler("0.12.0")
    factory: Any = SimpleNamespace(build_other=EagerGraph)
    made.compile([model], factory, GraphListener())
    return made


def metadata_of(**fields: Any) -> Any:
    nothing = {"generators": {}, "logitsprocs": SimpleNamespace(argmax_invariant=[])}
    return SimpleNamespace(**(nothing | {"top_k": None, "top_p": None} | fields))


def test_each_request_has_its_own_parameters(sampler: DeviceSampler) -> None:
    """The longest request is the second; the bucket's last row is padding."""
    order = LongestFirst()
    places = np.array([5, 9, 7])
    order.arrange(DecodeRows(np.zeros(3, dtype=np.int64), places, []), ROWS)
    # In each row of the graph two tokens are likely, one of them a little more.
    logits = torch.full((ROWS, VOCAB), -20.0)
    for row in range(ROWS):
        logits[row, 10 * row], logits[row, 10 * row + 1] = 1.0, 0.9
    metadata = metadata_of(
        temperature=torch.tensor([0.0, 1.0, 1.0]),
        top_k=torch.tensor([VOCAB, 2, VOCAB], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 0.1]),
    )
    outputs = StepOutputs([logits], order.restore)
    drawn = [sampler.draw(outputs, 3, metadata) for _ in range(60)]
    greedy, open_one, filtered = ({tokens[row][0] for tokens in drawn} for row in range(3))
    assert (greedy, open_one, filtered) == ({20}, {0, 1}, {10})


def test_a_low_temperature_leaves_the_likeliest(sampler: DeviceSampler) -> None:
    logits = torch.zeros(ROWS, VOCAB)
    logits[:, 7] = 0.5
    metadata = metadata_of(temperature=torch.tensor([0.01] * 3 + [100.0]))
    drawn = [sampler.draw(StepOutputs([logits]), 4, metadata) for _ in range(40)]
    assert {tokens[row][0] for tokens in drawn for row in range(3)} == {7}
    assert len({tokens[3][0] for tokens in drawn}) > 10


def test_seeds_are_the_hosts(sampler: DeviceSampler) -> None:
    assert sampler.takes(metadata_of())
    assert not sampler.takes(metadata_of(generators={0: torch.Generator()}))
