"""NPU properties by name, and their effect on ranks and shapes."""

import copy
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rbln_backend.config import RblnConfig
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.devices.port import device_capabilities
from rbln_backend.devices.rebel import limits
from rbln_backend.devices.rebel.compiler import make_rebel_compiler
from rbln_backend.devices.rebel.environment import RankDevices, announce_rank
from rbln_backend.devices.rebel.limits import Npu, RankMemory
from rbln_backend.devices.rebel.memory import TensorKvMemory
from rbln_backend.devices.rebel.modules import get_module
from rbln_backend.errors import ConfigError
from rbln_backend.graphs.program import Program
from rbln_backend.kv_cache.specs import AppendedWindowSpec, PagedSpec
from rbln_backend.lora.slots import INPUT_NAME, SlotNumbers
from rbln_backend.worker import memory
from rbln_backend.worker.inputs import (
    AdapterRows,
    DecodeRows,
    KvGroup,
    LongestFirst,
    PagedInputs,
    StepInputs,
)

GIB = 1 << 30


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are as they were afterwards."""
    names = ("RBLN_VISIBLE_DEVICES", "RBLN_NPUS_PER_DEVICE", "LOCAL_RANK", "WORLD_SIZE")
    for name in (*names, "RBLN_CTX_STANDALONE", "RBLN_FORCE_CCL_ASYNC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("visible", "number", "per_rank", "own"),
    [
        (None, 0, 1, "0"),
        (None, 3, 1, "3"),
        (None, 1, 2, "2,3"),
        ("4,5, 6,7", 1, 1, "5"),
        ("4,5,6,7", 1, 2, "6,7"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_a_rank_sees_its_own_npus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, number: int, per_rank: int, own: str
) -> None:
    if visible is not None:
        monkeypatch.setenv("RBLN_VISIBLE_DEVICES", visible)
    assert announce_rank(RankDevices(number, rank=number, ranks=4, npus_per_rank=per_rank)) == []
    assert os.environ["RBLN_VISIBLE_DEVICES"] == own
    assert os.environ.get("RBLN_NPUS_PER_DEVICE") == (None if per_rank == 1 else str(per_rank))
    assert (os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == (str(number), "4")
    assert os.environ["RBLN_CTX_STANDALONE"] == os.environ["RBLN_FORCE_CCL_ASYNC"] == "1"


@pytest.mark.usefixtures("environment")
def test_devices_follow_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number 1 of the host is number 0 of its engine, whose NPUs are named."""
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "4,5,6,7")
    place = {"rank": 1, "ranks": 2, "npus_per_rank": 1}
    announce_rank(RankDevices(1, **place, assigned=[6], local_rank=0))
    assert os.environ["RBLN_VISIBLE_DEVICES"] == "6"
    with pytest.raises(ConfigError, match="--device-ids names 1 NPUs, rank 1 is number 1 "):
        announce_rank(RankDevices(1, **place, assigned=[6], local_rank=1))


@pytest.mark.usefixtures("environment")
def test_variables_that_are_set_otherwise_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_FORCE_CCL_ASYNC", "0")
    (warning,) = announce_rank(RankDevices(0, rank=0, ranks=2, npus_per_rank=1))
    assert "RBLN_FORCE_CCL_ASYNC=0" in warning
    assert announce_rank(RankDevices(0, rank=0, ranks=1, npus_per_rank=1)) == []
    monkeypatch.delenv("RBLN_FORCE_CCL_ASYNC")
    monkeypatch.delenv("RBLN_VISIBLE_DEVICES", raising=False)
    # The old name of the devices does not win.
    monkeypatch.setenv("RBLN_DEVICES", "6,7")
    (warning,) = announce_rank(RankDevices(1, rank=1, ranks=2, npus_per_rank=1))
    assert "RBLN_DEVICES is the old name of RBLN_VISIBLE_DEVICES" in warning
    assert "RBLN_DEVICES" not in os.environ
    assert os.environ["RBLN_VISIBLE_DEVICES"] == "7"
    # Too few are named.
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"='3' names 1 NPUs, but rank 1 is given number 1 to 1"):
        announce_rank(RankDevices(1, rank=1, ranks=2, npus_per_rank=1))


def test_npus_differ_by_their_names() -> None:
    newest, older, atom = (Npu.named(name) for name in ("rbln-cr13", "RBLN-CR03", "RBLN-CA25"))
    assert (newest.name, newest.chiplets, atom.chiplets) == ("RBLN-CR13", 4, 1)
    assert (newest.appends_windows, older.appends_windows) == (True, False)
    assert (newest.wants_longest_first, older.wants_longest_first) == (True, False)
    assert atom.splits_tensors
    assert not newest.splits_tensors
    with pytest.raises(ConfigError, match="'H200' is not known"):
        Npu.named("H200")


def test_memory_is_what_graphs_and_copies_leave() -> None:
    # The vendor's estimate for its own tiny model, two KV heads over four chiplets: 64.1 GiB.
    memory = RankMemory(Npu.named("RBLN-CR13"), devices=1, num_graphs=4, num_kv_heads=2)
    assert memory.total_bytes == 140 * GIB
    assert memory.runtime_bytes == 4 * GIB
    assert memory.kv_copies == 2
    assert memory.kv_budget_bytes(0.9, GIB) == (int(140 * GIB * 0.9) - 5 * GIB) // 2
    # Adapters may lie on each of four chiplets.
    slots = GIB // 4
    assert memory.kv_budget_bytes(0.9, GIB, slots) == (int(140 * GIB * 0.9) - 6 * GIB) // 2
    pair = RankMemory(Npu.named("RBLN-CA25"), devices=2, num_graphs=4, num_kv_heads=8)
    assert (pair.runtime_bytes, pair.kv_copies) == (2 * GIB, 1)


@pytest.mark.parametrize("size", [16, 256, 1000, 32768])
def test_blocks_that_compile_and_others(size: int) -> None:
    for fine in (512, 1024, 16384):
        limits.check_block(fine)
    with pytest.raises(ConfigError, match=rf"--block-size {size}: .* from 512 to 16384"):
        limits.check_block(size)


def test_numbers_of_blocks_and_windows_have_a_largest() -> None:
    limits.check_num_blocks(32767)
    with pytest.raises(ConfigError, match=r"32768 blocks: .* at most 32767; set --num-gpu-blocks"):
        limits.check_num_blocks(32768)
    limits.check_windows([32767])
    with pytest.raises(ConfigError, match="window of 32768 tokens"):
        limits.check_windows([128, 32768])


def test_chunks_divide_the_block_and_units_the_chunk() -> None:
    limits.check_chunks(1024, (128, 1024))
    with pytest.raises(ConfigError, match=r"chunk of 384 tokens .* block of 1024"):
        limits.check_chunks(1024, (128, 384))
    chunks = [limits.fitting_chunk(1024, n) for n in (1, 200, 256, 257, 5000)]
    assert chunks == [1, 256, 256, 512, 1024]
    # Units below a chunk need a store across blocks.
    limits.check_reuse_unit(Npu.named("RBLN-CR13"), 64, 128)
    limits.check_reuse_unit(Npu.named("RBLN-CR03"), 128, 128)
    with pytest.raises(ConfigError, match=r"sub_block_size=64 .* RBLN-CR03 cannot store"):
        limits.check_reuse_unit(Npu.named("RBLN-CR03"), 64, 128)


def test_rows_go_longest_first_and_come_back() -> None:
    group = KvGroup(layer_names=("a",), block_size=16, width=3, is_window=False, one_block=False)
    inputs, order = StepInputs.allocate(GraphSpec.of(Phase.DECODE, 4), [group]), LongestFirst()
    blocks = np.array([[1, 0, 0], [2, 3, 0], [4, 0, 0]])
    rows = DecodeRows(np.array([11, 12, 13]), np.array([5, 20, 5]), [blocks])
    inputs.fill_decode(*order.arrange(rows, 4))
    (paged,) = inputs.groups
    assert isinstance(paged, PagedInputs)
    assert inputs.token_ids[:, 0].tolist() == [12, 11, 13, 0]
    assert paged.seq_idx[:, 0].tolist() == [20, 5, 5, 0]
    assert paged.block_tables[:3, 0].tolist() == [2, 1, 4]
    restored = order.restore(torch.tensor([120.0, 110.0, 130.0, 0.0]))
    assert restored.tolist() == [110.0, 120.0, 130.0, 0.0]
    # With drafts.
    inputs, order = StepInputs.allocate(GraphSpec.of(Phase.VERIFY, 4, 3), [group]), LongestFirst()
    rows = DecodeRows(np.array([11, 12]), np.array([5, 20]), [np.array([[1, 0, 0], [2, 3, 0]])])
    inputs.fill_verify(order.arrange(rows, 4), order.rearrange([[7, 8], [9]]))
    assert inputs.token_ids.tolist() == [[12, 9, 0], [11, 7, 8], [0] * 3, [0] * 3]
    assert inputs.positions.tolist() == [[20, 21, 0], [5, 6, 7], [0] * 3, [0] * 3]
    (paged,) = inputs.groups
    assert isinstance(paged, PagedInputs)
    assert paged.seq_idx[:, 0].tolist() == [20, 5, 0, 0]
    logits = torch.arange(12.0).view(4, 3)
    assert order.restore(logits)[:2].tolist() == [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0]]


@pytest.mark.parametrize(("phase", "length"), [(Phase.DECODE, 1), (Phase.VERIFY, 3)])
def test_adapters_go_with_their_rows(phase: Phase, length: int) -> None:
    """The last request reads a prompt token in a row behind the batch, and is the longest."""
    spec, order = GraphSpec.of(phase, 8, length), LongestFirst()
    inputs = StepInputs.allocate(spec, [], row_input=SlotNumbers())
    positions = np.array([5, 20, 9, 30])
    order.arrange(DecodeRows(np.zeros(4, dtype=np.int64), positions, []), spec.bucket)
    held = SimpleNamespace(request_lora_mapping=np.array([1, 0, 2]), lora_id_to_lora_request={})
    adapters: Any = SimpleNamespace(
        get_slots=lambda ids, _: [number - 1 for number in ids], get_slot=lambda number: number
    )
    batch: Any = SimpleNamespace(phase=phase, input_batch=held, num_reqs=3, decode_prefill=[3])
    AdapterRows(adapters, order).fill(inputs, batch)
    # By length: the fourth, the second, the third, the first.
    assert inputs.tensors[INPUT_NAME].tolist() == [3, -1, 1, 0, -1, -1, -1, -1]


def test_no_more_blocks_than_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32, "block_size": 1024}
    page = 2 * 1024 * 32 * 4
    full, window = PagedSpec(**common), AppendedWindowSpec(**common, sliding_window=64)
    left = SimpleNamespace(kv_budget_bytes=lambda *_: 1 << 60)
    monkeypatch.setattr(memory, "rank_memory", lambda *_: left)
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(gpu_memory_utilization=0.9))
    npu: Any = SimpleNamespace()

    def budget(*specs: Any) -> int:
        return memory.npu_budget_bytes(npu, config, torch.nn.Linear(1, 1), specs)

    assert budget(full, full) == 2 * page * memory.LARGEST_NUM_BLOCKS
    # Of two kinds the smaller one may fill a group.
    assert budget(full, full, window) == page * memory.LARGEST_NUM_BLOCKS
    assert budget() == 1 << 60


# -------------------------------------------------------------------------------------- sdk modules
INPUTS = (torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
WANTED = torch.tensor([12.0, 24.0])


@pytest.fixture
def module() -> fx.GraphModule:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    doubled = graph.call_method("mul", (x, 2))
    graph.output((graph.call_function(torch.add, (doubled, weight)),))
    return get_module(Program(graph, ("input:x", "param:weight")), INPUTS, None)


def copied(module: fx.GraphModule) -> Callable[..., Any]:
    found = copy.deepcopy(module)
    assert isinstance(found, fx.GraphModule)
    assert found.graph is not module.graph
    return found


USES: dict[str, Callable[[fx.GraphModule], Callable[..., Any]]] = {
    "as it is": lambda module: module,
    "copied": copied,
    "interpreted": lambda module: fx.Interpreter(module).run,
    "generated": lambda module: fx.GraphModule(module, module.graph),
    "exported": lambda module: torch.export.export(module, INPUTS, strict=False).module(),
    "strictly exported": lambda module: torch.export.export(module, INPUTS, strict=True).module(),
    "traced": lambda module: make_fx(module)(*INPUTS),
    "symbolically traced": fx.symbolic_trace,
}


@pytest.mark.parametrize("use", USES)
def test_a_compiler_can_use_it_as_any_graph_module(use: str, module: fx.GraphModule) -> None:
    (result,) = USES[use](module)(*INPUTS)
    assert torch.equal(result, WANTED)


def test_ops_have_the_names_that_dynamo_gives() -> None:
    """Also those of a stored program, which names overloads."""
    ids, table = torch.tensor([1, 0]), torch.randn(3, 2)

    def lookup(ids: Tensor, table: Tensor) -> tuple[Tensor]:
        return (torch.ops.aten.embedding(table, ids),)

    targets: list[list[Any]] = []

    def take(given: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        targets.append([node.target for node in given.graph.nodes if node.op == "call_function"])
        return given.forward

    torch.compile(lookup, backend=take)(ids, table)
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    graph.output((graph.call_function(torch.ops.aten.embedding.default, (weight, x)),))
    stored = Program.from_bytes(Program(graph, ("input:x", "param:weight")).to_bytes())
    calls = [n for n in get_module(stored, INPUTS, None).graph.nodes if n.op == "call_function"]
    assert [node.target for node in calls] == targets[0]


def test_a_change_of_its_graph_is_followed(module: fx.GraphModule) -> None:
    other = copy.deepcopy(module)
    for node in module.graph.nodes:
        if node.target is torch.add:
            node.target = torch.sub
    module.recompile()
    assert torch.equal(module(*INPUTS)[0], torch.tensor([-8.0, -16.0]))
    assert torch.equal(other(*INPUTS)[0], WANTED), "a copy has calls of its own"


# ------------------------------------------------------------------------------------------- device
SDK = """
__version__ = "0.12.3"
NPU_OF = {npus!r}

ASKED = []

def get_npu_name(device_id):
    ASKED.append(device_id)
    return NPU_OF.get(device_id)

class CompileContext:
    def __init__(self, **options):
        pass
"""

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a package called ``rebel`` with the given source; it is forgotten afterwards."""
    core = tmp_path / "rebel" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "torch_compile.py").write_text("def rbln_backend(graph, inputs, **kwargs): ...")

    def write(source: str) -> None:
        device_capabilities.cache_clear()
        (tmp_path / "rebel" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "rebel"]:
        del sys.modules[name]
    device_capabilities.cache_clear()


def test_a_found_npu_comes_before_a_forced_name(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(SDK.format(npus={0: "RBLN-CR13"}))
    config = RblnConfig(force_npu_name="RBLN-CA25")
    assert device_capabilities(config).device == "rebel"
    with caplog.at_level(logging.WARNING):
        assert make_rebel_compiler(config, None).hardware == "RBLN-CR13"
    assert "RBLN_FORCE_NPU_NAME=RBLN-CA25 is ignored: the host has RBLN-CR13" in caplog.text


def test_the_driver_is_asked_once_for_all_layers_of_a_model(install: Install) -> None:
    install(SDK.format(npus={0: "RBLN-CR13"}))
    for _ in range(3):
        assert device_capabilities(RblnConfig()).device == "rebel"
    assert sys.modules["rebel"].ASKED == [0]


def test_a_forced_name_stands_in_where_no_npu_is(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(SDK.format(npus={}))
    config = RblnConfig(force_npu_name="RBLN-CA25")
    assert device_capabilities(RblnConfig()).device == "emulated"
    assert device_capabilities(config).device == "rebel"
    assert make_rebel_compiler(config, None).hardware == "RBLN-CA25"
    assert not caplog.text
    with pytest.raises(ConfigError, match="RBLN_FORCE_NPU_NAME"):
        device_capabilities(RblnConfig(device="rebel"))


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (RblnConfig(device="rebel"), "device='rebel'"),
        (RblnConfig(force_npu_name="RBLN-CR13"), "force_npu_name='RBLN-CR13'"),
    ],
)
def test_without_the_sdk_a_required_npu_is_an_error(config: RblnConfig, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}.*needs the RBLN SDK.*'npu' extra"):
        device_capabilities(config)


def test_without_the_sdk_the_device_is_emulated_unless_an_npu_is_required() -> None:
    assert device_capabilities(RblnConfig()).device == "emulated"
    assert (
        device_capabilities(RblnConfig(device="emulated", force_npu_name="RBLN-CR13")).device
        == "emulated"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import a_part_of_the_sdk", "ModuleNotFoundError: No module named 'a_part_of_the_sdk'"),
        ("raise ImportError('librbln.so: cannot open')", "ImportError: librbln.so: cannot open"),
        ("raise RuntimeError('registered twice')", "RuntimeError: registered twice"),
    ],
)
@pytest.mark.parametrize("config", [RblnConfig(), RblnConfig(device="rebel")])
def test_an_sdk_that_does_not_load_is_an_error(
    install: Install, config: RblnConfig, source: str, said: str
) -> None:
    install(source)
    with pytest.raises(ConfigError, match=f"'import rebel' fails with {said}"):
        device_capabilities(config)
    assert device_capabilities(RblnConfig(device="emulated")).device == "emulated"


def test_torch_rbln_that_does_not_load_is_an_error(install: Install, tmp_path: Path) -> None:
    """Else a start would go on with caches that KV transfer and tiers cannot read."""
    install(SDK.format(npus={0: "RBLN-CR13"}))
    (tmp_path / "torch_rbln.py").write_text("raise ImportError('no librbln.so')")
    assert device_capabilities(RblnConfig()).copies_caches
    with pytest.raises(ConfigError, match="torch-rbln is installed, but does not load"):
        make_rebel_compiler(RblnConfig(), None)
    off = RblnConfig(use_device_tensor=False)
    assert not device_capabilities(off).copies_caches
    assert make_rebel_compiler(off, None).hardware == "RBLN-CR13"


# ---------------------------------------------------------------------------------------- kv memory
Pairs = list[tuple[Tensor, Tensor]]


@pytest.fixture
def kv_memory() -> TensorKvMemory:
    def aligned(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float16)

    return TensorKvMemory(torch.device("cpu"), lambda error: error, aligned)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    made: Pairs = []
    copy = torch._foreach_copy_

    def note(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        made.extend(zip(targets, sources, strict=True))
        copy(list(targets), list(sources))

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    return made


@pytest.mark.parametrize("shape", [(4, 2, 3, 1, 16, 8), (4, 16, 8)])
@pytest.mark.parametrize(("slot", "tokens"), [(0, 16), (4, 8)])
def test_tokens_go_out_and_come_back_in_contiguous_pieces(
    kv_memory: TensorKvMemory, pairs: Pairs, shape: tuple[int, ...], slot: int, tokens: int
) -> None:
    """The vendor's runtime fails where neither side of a copy is contiguous."""
    cache = kv_memory.allocate("layer", shape, torch.float32).normal_()
    page = torch.empty(*shape[1:-2], tokens, shape[-1])
    kv_memory.read_tokens(cache, 2, slot, page)
    assert torch.equal(page, cache[2][..., slot : slot + tokens, :])
    before = cache.clone()
    kv_memory.write_tokens(cache, 1, slot, page)
    before[1][..., slot : slot + tokens, :] = page
    assert torch.equal(cache, before)
    assert all(one.is_contiguous() for pair in pairs for one in pair)
    heads = 1 if tokens == shape[-2] else page[..., 0, 0].numel()
    assert len(pairs) == 2 * heads


def test_shared_blocks_have_the_shape_of_the_cache(kv_memory: TensorKvMemory) -> None:
    cache = kv_memory.allocate("layer", (3, 2, 1, 1, 5, 3), torch.uint8)
    shared = kv_memory.shared_blocks(cache)
    assert (shared.shape, shared.dtype, shared.is_contiguous()) == (cache.shape, torch.uint8, True)
