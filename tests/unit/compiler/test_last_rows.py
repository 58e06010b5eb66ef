"""Behind the last attention a prefill graph computes the rows of its logits apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rbln_backend.core import GraphSpec, UsefulRows
from rbln_backend.devices.emulated.compiler import EmulatedGraph
from rbln_backend.devices.emulated.kernel_set import load_kernels, start_recording
from rbln_backend.devices.emulated.lowering import lower_graph
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable
from tests.kernel_cache import share_kernels

TOKENS, HEAD, WIDTH, VOCABULARY = 40, 32, 64, 96


@pytest.fixture(autouse=True)
def native_kernels(tmp_path: Path) -> Iterator[None]:
    load_kernels(share_kernels(tmp_path), "native")
    yield


class Model(nn.Module):
    """One layer of attention and a gated MLP, hidden states and logits of some rows."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = (
            nn.Linear(*s, bias=False) for s in ((WIDTH, 2 * WIDTH), (WIDTH, WIDTH))
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.norm = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.tensor(HEAD**-0.5))
        self.register_buffer("cache", torch.randn(2, 2, 1, 1, 64, HEAD))

    def forward(
        self, x: Tensor, starts: Tensor, tables: Tensor, ends: Tensor
    ) -> tuple[Tensor, ...]:
        ops = torch.ops.rbln_emulator
        qkv = self.qkv(ops.rms_norm(x, self.norm, 1e-6))
        columns = (qkv, 0, qkv, WIDTH, qkv, WIDTH + HEAD)
        attended = ops.self_attention(
            *columns,
            None,
            None,
            0.0,
            None,
            None,
            True,
            self.cache,
            self.scale,
            starts,
            None,
            tables,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            2,
            1,
            None,
        )
        hidden, residual = ops.fused_add_rms_norm(self.out(attended), x, self.norm, 1e-6)
        mixed = self.down(ops.activate(self.up(hidden), "silu", True))
        if self.writes:
            mixed.mul_(2)
        hidden = ops.rms_norm(mixed + residual, self.norm, 1e-6)
        logits = self.head(hidden.index_select(0, ends))
        if self.writes:
            logits.mul_(2)
        return logits, hidden


class BatchedModel(Model):
    """A model whose layers keep a batch axis [1, L, H], as vLLM's Transformers backend has it."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.drop = drop

    def forward(
        self, x: Tensor, starts: Tensor, tables: Tensor, ends: Tensor
    ) -> tuple[Tensor, ...]:
        _, rows = super().forward(x, starts, tables, ends)
        batched = rows.unsqueeze(0) + x.unsqueeze(0)
        hidden = self.drop(batched + batched)
        return self.head(hidden.index_select(0, ends)), hidden


def inputs() -> dict[str, Tensor]:
    return {
        "x": torch.randn(TOKENS, WIDTH),
        "starts": torch.zeros(1, 1, dtype=torch.int32),
        "tables": torch.ones(1, 1, dtype=torch.int32),
        "ends": torch.tensor([24, 30, 11]),
    }


def lowered(model: Model, step: dict[str, Tensor]) -> tuple[Program, TensorTable]:
    table = TensorTable(torch.ops.rbln_emulator.pack_linear_weight)
    table.add_model(model)
    program = capture(model, tuple(step.values()), table, step)
    return lower_graph(program, pack_linear=True), table


def linears(program: Program) -> list[tuple[int, ...]]:
    graph, rows = program.graph, torch.ops.rbln_emulator.linear.default
    return [node.args[3] for node in graph.nodes if node.target is rows]


@torch.inference_mode()
def test_rows_of_logits_are_computed_apart() -> None:
    torch.manual_seed(3)
    model, step = Model(), inputs()
    program, table = lowered(model, step)
    program = Program.from_bytes(program.to_bytes())
    # What hidden states need comes last.
    own = [WIDTH, 2 * WIDTH, WIDTH]
    assert linears(program) == [2 * WIDTH, *own, VOCABULARY, *own]
    spec = GraphSpec("prefill", TOKENS, prompts=3)
    tensors = table.resolve_all(program.bindings, step)
    logits, hidden = model(*step.values())
    for record in (None, start_recording):
        graph = EmulatedGraph(spec, program.graph, tensors, record)
        for useful in (None, None, UsefulRows(31, 2), UsefulRows(31, 2, reads_hidden=False)):
            outputs = graph.run(useful)
            count, rows = (2, 31) if useful else (3, TOKENS)
            torch.testing.assert_close(outputs[0][:count], logits[:count])
            torch.testing.assert_close(outputs[1][:rows], hidden[:rows])
            # The same bits as the head over all hidden states.
            picked = outputs[1][step["ends"][:count]]
            packed = table.resolve_all(["packed:head.weight"], {})[0]
            whole = torch.ops.rbln_emulator.linear(picked, packed, None, VOCABULARY)
            assert torch.equal(outputs[0][:count], whole)
    # Hidden states that are not read are not computed.
    hidden = graph.run()[1].zero_()
    graph.run(UsefulRows(TOKENS, 3, reads_hidden=False))
    assert not hidden.any()
    torch.testing.assert_close(graph.run(UsefulRows(TOKENS, 3))[0], logits)
    assert hidden.any()


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: x[0],
        lambda x: x[0, ...],
        lambda x: x[:, :, :][0],
        lambda x: x.squeeze(0),
        lambda x: x.flatten(0, 1),
    ],
)
@torch.inference_mode()
def test_rows_behind_a_dropped_batch_axis_are_gathered(drop: Callable[[Tensor], Tensor]) -> None:
    model, step = BatchedModel(drop), inputs()
    program, table = lowered(model, step)
    tensors = table.resolve_all(program.bindings, step)
    logits, hidden = model(*step.values())
    graph = EmulatedGraph(
        GraphSpec("prefill", TOKENS, prompts=3), program.graph, tensors, start_recording
    )
    for useful in (None, UsefulRows(31, 2), UsefulRows(31, 2, reads_hidden=False)):
        outputs = graph.run(useful)
        count = 2 if useful else 3
        torch.testing.assert_close(outputs[0][:count], logits[:count])
    torch.testing.assert_close(outputs[1][:31], hidden[:31])


@torch.inference_mode()
def test_a_tensor_that_is_written_keeps_all_rows_together() -> None:
    model, step = Model(writes=True), inputs()
    program, table = lowered(model, step)
    assert linears(program) == [2 * WIDTH, WIDTH, 2 * WIDTH, WIDTH, VOCABULARY]
    tensors = table.resolve_all(program.bindings, step)
    graph = EmulatedGraph(
        GraphSpec("prefill", TOKENS, prompts=3), program.graph, tensors, start_recording
    )
    logits, _ = model(*step.values())
    for _ in range(2):
        outputs = graph.run(UsefulRows(TOKENS, 3, reads_hidden=False))
        torch.testing.assert_close(outputs[0], logits)
        outputs[0].zero_()
