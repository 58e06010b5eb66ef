"""A recorded run, made again, computes from what its inputs hold now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from rbln_backend.core import GraphSpec, UsefulRows
from rbln_backend.devices.emulated.compiler import EmulatedGraph
from rbln_backend.devices.emulated.kernel_set import load_kernels, set_threads, start_recording
from tests.kernel_cache import share_kernels

OPS = torch.ops.rbln_emulator


@pytest.fixture(autouse=True)
def native_kernels(tmp_path: Path) -> Iterator[None]:
    load_kernels(share_kernels(tmp_path), "native")
    yield
    set_threads(1)


def computation(x: Tensor, weight: Tensor, packed: Tensor, store: Tensor) -> tuple[Tensor, ...]:
    """Native ops, views, copies, writes in place, operators with and without an out variant."""
    hidden = OPS.rms_norm(x, weight, 1e-6)
    hidden = OPS.linear(hidden.view(-1, 8), packed, None, 12)
    first, second = hidden.split([8, 4], dim=-1)
    total, residual = OPS.fused_add_rms_norm(first, x, weight, 1e-6)
    store[0].copy_(residual[0])
    scaled = x.new_empty(3, 8)
    scaled.view(-1).copy_((total * 2 + second.sum()).reshape(-1))
    turned = scaled.t().contiguous().reshape(3, 8)
    # A native op over rows that must be copied together first.
    strided = OPS.rms_norm(
        turned.t()[:3].t()[:, :3].unsqueeze(0).permute(2, 1, 0), weight[:1], 1e-6
    )
    return torch.softmax(turned, -1), strided, residual


def graph_over(*tensors: Tensor, recorded: bool) -> EmulatedGraph:
    graph = fx.symbolic_trace(computation).graph
    return EmulatedGraph(
        GraphSpec("decode", 3), graph, tensors, start_recording if recorded else None
    )


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    packed = OPS.pack_linear_weight(torch.randn(12, 8))
    return torch.randn(3, 8), torch.randn(8), packed, torch.zeros(2, 8)


def test_later_runs_compute_what_an_interpreted_run_computes() -> None:
    recorded, interpreted = inputs(), inputs()
    graph = graph_over(*recorded, recorded=True)
    other = graph_over(*interpreted, recorded=False)
    for seed in range(4):
        values = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        recorded[0].copy_(values)
        interpreted[0].copy_(values)
        with torch.inference_mode():
            pairs = zip(graph.run(), other.run(), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert torch.equal(recorded[3], interpreted[3])
    assert len(graph._steps) > 3


def test_a_graph_prepared_without_computing_runs_like_any_other() -> None:
    prepared, interpreted = inputs(), inputs()
    graph = graph_over(*prepared, recorded=True)
    prepared[0].fill_(torch.nan)
    graph.prepare()
    assert graph._steps
    prepared[0].copy_(interpreted[0])
    expected = graph_over(*interpreted, recorded=False).run()
    assert all(torch.equal(x, y) for x, y in zip(graph.run(), expected, strict=True))


def test_runs_write_to_the_same_memory() -> None:
    graph = graph_over(*inputs(), recorded=True)
    first = [output.data_ptr() for output in graph.run()]
    assert [output.data_ptr() for output in graph.run()] == first


def test_two_graphs_in_one_arena_do_not_disturb_each_other() -> None:
    a, b = inputs(), inputs()
    b[0].mul_(3)
    graphs = [graph_over(*tensors, recorded=True) for tensors in (a, b)]
    expected = [graph_over(*t, recorded=False).run() for t in (a, b)]
    for _ in range(2):
        for graph, values in zip(graphs, expected, strict=True):
            outputs = graph.run()
            assert all(torch.equal(x, y) for x, y in zip(outputs, values, strict=True))


def chunk_layer(
    x: Tensor, weight: Tensor, packed: Tensor, ends: Tensor, slots: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, ...]:
    """Kernels over tokens and heads of a chunk, and over the last row of each prompt."""
    hidden = OPS.rms_norm(x, weight, 1e-6)
    hidden = OPS.rms_norm(hidden.view(-1, 2, 4), weight[:4], 1e-6).view(-1, 8)
    wide = OPS.linear(hidden, packed, None, 12)
    OPS.add_lora_(wide, hidden, slots, a, [b], 2, [12])
    gated = OPS.activate(wide, "silu", False)
    total, residual = OPS.fused_add_rms_norm(gated[:, :8].contiguous(), x, weight, 1e-6)
    return total, residual, OPS.linear(total.index_select(0, ends), packed, None, 12)


@torch.inference_mode()
def test_kernels_skip_rows_of_padding() -> None:
    torch.manual_seed(2)
    packed = OPS.pack_linear_weight(torch.randn(12, 8))
    a, b = (OPS.pack_linear_weight(torch.randn(*shape))[None] for shape in ((2, 8), (12, 2)))
    x, weight = torch.randn(40, 8), torch.randn(8)
    ends, slots = torch.tensor([3, 24, 30]), torch.zeros(1, dtype=torch.int32)
    graph = EmulatedGraph(
        GraphSpec("prefill", 40, prompts=3),
        fx.symbolic_trace(chunk_layer).graph,
        (x, weight, packed, ends, slots, a, b),
        start_recording,
    )
    expected = [output.clone() for output in graph.run()]
    # Rows that are computed from padding are NaN.
    x[25:] = torch.nan
    for count in (2, 0):
        for output in graph.run():
            output.zero_()
        outputs = graph.run(UsefulRows(25, count))
        for output, whole, rows in zip(outputs, expected, (25, 25, count), strict=True):
            assert torch.equal(output[:rows], whole[:rows])
            assert not output[rows:].isnan().any()
        ends.fill_(30)
    # The next run computes all of them.
    assert graph.run()[0][25:].isnan().all()


def rotate(positions: Tensor, q: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    return (OPS.rotary_embedding(positions, q, q, table, 8, True)[0],)


def test_a_repeated_call_checks_its_arguments_again() -> None:
    positions = torch.zeros(3, dtype=torch.int64)
    graph = EmulatedGraph(
        GraphSpec("decode", 3),
        fx.symbolic_trace(rotate).graph,
        (positions, torch.randn(3, 16), torch.randn(5, 8)),
        start_recording,
    )
    graph.run()
    positions[1] = 5
    with pytest.raises(RuntimeError, match="position 5 is outside the rotary cache of 5"):
        graph.run()


def test_a_graph_that_reads_values_stays_interpreted() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_method("item", (graph.call_method("sum", (x,)),))
    graph.output((graph.call_function(torch.mul, (x, total)),))
    values = torch.ones(2)
    compiled = EmulatedGraph(GraphSpec("decode", 1), graph, (values,), start_recording)
    assert compiled.run()[0].tolist() == [2.0, 2.0]
    values.fill_(2)
    assert compiled.run()[0].tolist() == [8.0, 8.0]
