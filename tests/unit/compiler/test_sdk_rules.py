"""NPU properties by name, and their effect on ranks and shapes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.devices.rebel import limits
from rbln_backend.devices.rebel.environment import RankDevices, announce_rank
from rbln_backend.devices.rebel.limits import Npu, RankMemory
from rbln_backend.errors import ConfigError
from rbln_backend.kv_cache.specs import AppendedWindowSpec, PagedSpec
from rbln_backend.lora.row_input import SlotNumbers
from rbln_backend.lora.slots import INPUT_NAME
from rbln_backend.worker import memory
from rbln_backend.worker.group_inputs import KvGroup, PagedInputs
from rbln_backend.worker.inputs import AdapterRows, DecodeRows, LongestFirst, StepInputs

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
def test_too_few_npus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"='3' names 1 NPUs, but rank 1 is given number 1 to 1"):
        announce_rank(RankDevices(1, rank=1, ranks=2, npus_per_rank=1))


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
def test_collectives_that_wait_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_FORCE_CCL_ASYNC", "0")
    (warning,) = announce_rank(RankDevices(0, rank=0, ranks=2, npus_per_rank=1))
    assert "RBLN_FORCE_CCL_ASYNC=0" in warning
    assert announce_rank(RankDevices(0, rank=0, ranks=1, npus_per_rank=1)) == []


@pytest.mark.usefixtures("environment")
def test_the_old_name_of_the_devices_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_DEVICES", "6,7")
    (warning,) = announce_rank(RankDevices(1, rank=1, ranks=2, npus_per_rank=1))
    assert "RBLN_DEVICES is the old name of RBLN_VISIBLE_DEVICES" in warning
    assert "RBLN_DEVICES" not in os.environ
    assert os.environ["RBLN_VISIBLE_DEVICES"] == "7"


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


@pytest.mark.parametrize("size", [512, 1024, 16384])
def test_blocks_that_compile(size: int) -> None:
    limits.check_block(size)


@pytest.mark.parametrize("size", [16, 256, 1000, 32768])
def test_blocks_that_do_not(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--block-size {size}: .* from 512 to 16384"):
        limits.check_block(size)


def test_blocks_are_numbered_in_16_bits() -> None:
    limits.check_num_blocks(32767)
    with pytest.raises(ConfigError, match=r"32768 blocks: .* at most 32767; set --num-gpu-blocks"):
        limits.check_num_blocks(32768)


def test_chunks_divide_the_block() -> None:
    limits.check_chunks(1024, (128, 1024))
    with pytest.raises(ConfigError, match=r"chunk of 384 tokens .* block of 1024"):
        limits.check_chunks(1024, (128, 384))
    assert [limits.fitting_chunk(1024, n) for n in (1, 200, 256, 257, 5000)] == [
        *(1, 256, 256, 512, 1024),
    ]


def test_units_below_a_chunk_need_a_store_across_blocks() -> None:
    limits.check_reuse_unit(Npu.named("RBLN-CR13"), 64, 128)
    limits.check_reuse_unit(Npu.named("RBLN-CR03"), 128, 128)
    with pytest.raises(ConfigError, match=r"sub_block_size=64 .* RBLN-CR03 cannot store"):
        limits.check_reuse_unit(Npu.named("RBLN-CR03"), 64, 128)


def test_windows_have_a_largest() -> None:
    limits.check_windows([32767])
    with pytest.raises(ConfigError, match="window of 32768 tokens"):
        limits.check_windows([128, 32768])


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


def test_rows_with_drafts_go_longest_first_and_come_back() -> None:
    group = KvGroup(layer_names=("a",), block_size=16, width=3, is_window=False, one_block=False)
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
        slots_of=lambda ids, _: [number - 1 for number in ids], slot_of=lambda number: number
    )
    batch: Any = SimpleNamespace(phase=phase, input_batch=held, num_reqs=3, decode_prefill=[3])
    AdapterRows(adapters, order).fill(inputs, batch)
    # By length: the fourth, the second, the third, the first.
    assert inputs.tensors[INPUT_NAME].tolist() == [3, -1, 1, 0, -1, -1, -1, -1]


def test_no_more_blocks_than_numbers() -> None:
    common = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32, "block_size": 1024}
    page = 2 * 1024 * 32 * 4
    full, window = PagedSpec(**common), AppendedWindowSpec(**common, sliding_window=64)
    assert memory._smallest_group_bytes([full, full]) == 2 * page
    # Of two kinds the smaller one may fill a group.
    assert memory._smallest_group_bytes([full, full, window]) == page
    assert memory._smallest_group_bytes([]) == 0
