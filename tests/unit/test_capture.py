"""Captured models as programs that can be stored."""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from rbln_backend.core import GraphSpec, UsefulRows
from rbln_backend.devices.emulated.compiler import EmulatedGraph
from rbln_backend.devices.emulated.kernel_set import start_recording
from rbln_backend.devices.emulated.lowering import lower_graph, op_name
from rbln_backend.errors import CompileError
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable

pytestmark = pytest.mark.usefixtures("native_kernels")


def captured(function: Callable[[Tensor], Tensor], model: nn.Module | None = None) -> Program:
    table = TensorTable(lambda weight: weight)
    if model is not None:
        table.add_model(model)
    x = torch.randn(3, 4)
    return capture(function, (x,), table, {"x": x})


def test_capturing_computes_nothing() -> None:
    x, written = torch.randn(3, 4), torch.zeros(3, 4)
    table = TensorTable(lambda weight: weight)
    capture(lambda x, written: written.copy_(x), (x, written), table, {"x": x, "written": written})
    assert not written.any()


def operators(program: Program) -> list[str]:
    calls = [node for node in program.graph.nodes if node.op.startswith("call")]
    return [getattr(node.target, "__name__", str(node.target)) for node in calls]


def under(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        with context():
            return x.cos()

    return function


@pytest.mark.parametrize(
    "function",
    [
        under(torch.no_grad),
        under(lambda: torch.autocast("cpu", enabled=False)),
        lambda x: functional.dropout(functional.dropout(x.cos(), 0.5, False), p=0.0),
        lambda x: nn.Identity()(x).cos(),
    ],
    ids=["no gradients", "no autocast", "idle dropout", "a module made inside"],
)
def test_what_computes_nothing_is_left_out(function: Callable[[Tensor], Tensor]) -> None:
    program = captured(function)
    assert operators(program) == ["cos"]
    assert operators(Program.from_bytes(program.to_bytes())) == ["cos"]


NUMBER = torch.tensor(1.5, dtype=torch.float64)


def test_a_number_that_code_keeps_as_a_tensor_is_written_into_the_program() -> None:
    program = captured(lambda x: x.cos() * (NUMBER / torch.tensor(2.0)))
    assert program.bindings == ("input:x",)
    again = Program.from_bytes(program.to_bytes())
    x = torch.randn(3, 4)
    (result,) = fx.Interpreter(fx.GraphModule({}, again.graph)).run(x)
    assert torch.equal(result, x.cos() * 0.75)
    assert result.dtype == torch.float32
    # A transpose is a method.
    program = Program.from_bytes(captured(lambda x: x.T.cos()).to_bytes())
    (result,) = fx.Interpreter(fx.GraphModule({}, program.graph)).run(x)
    assert torch.equal(result, x.t().cos())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.dropout(x.cos(), p=0.5),
        under(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    ],
    ids=["dropout", "autocast"],
)
def test_what_would_change_the_result_is_kept_and_cannot_be_stored(
    function: Callable[[Tensor], Tensor],
) -> None:
    program = captured(function)
    assert len(operators(program)) > 1
    with pytest.raises(CompileError, match="cannot be stored"):
        program.to_bytes()


def test_weights_and_buffers_are_bound_by_name() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("factor", torch.tensor(0.5))
    program = captured(lambda x: functional.pad(model(x) * model.factor, (0, 1)), model)
    assert sorted(program.bindings) == ["input:x", "param:bias", "param:factor", "param:weight"]
    assert Program.from_bytes(program.to_bytes()).bindings == program.bindings


def test_a_tensor_without_a_name_is_refused() -> None:
    unknown = torch.randn(4)
    with pytest.raises(CompileError, match=r"shape \(4,\) that is neither a weight"):
        captured(lambda x: x + unknown)


# ---------------------------------------------------------------------------------------- last rows
OPS = torch.ops.rbln_emulator
TOKENS, HEAD, WIDTH, VOCABULARY = 40, 32, 64, 96


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
            *[None] * 7,
            2,
            1,
            None,
        )
        hidden, residual = ops.fused_add_rms_norm(self.out(attended), x, self.norm, 1e-6)
        mixed = self.mix(hidden)
        if self.writes:
            mixed.mul_(2)
        hidden = ops.rms_norm(mixed + residual, self.norm, 1e-6)
        logits = self.head(hidden.index_select(0, ends))
        if self.writes:
            logits.mul_(2)
        return logits, hidden

    def mix(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(OPS.activate(self.up(x), "silu", True))
        return mixed


class OfRelu(Model):
    """Functions of PyTorch, and a gate of one number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.plain = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.down(functional.relu(self.plain(x))) - x


class OfExperts(Model):
    """Experts of rows that a mask leaves, and a factor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.register_buffer("mask", (torch.arange(TOKENS) < 31).float().view(-1, 1))
        for name, shape in (("w13", (4, 2 * WIDTH, WIDTH)), ("w2", (4, WIDTH, WIDTH))):
            packed = [OPS.pack_linear_weight(w) for w in torch.randn(shape) / 8]
            self.register_buffer(name, torch.stack(packed))

    def mix(self, x: Tensor) -> Tensor:
        weights, ids = OPS.moe_route(self.router(x), 2, True, None, self.mask)
        mixed: Tensor = OPS.moe(x, weights, ids, self.w13, None, self.w2, None, WIDTH, "silu")
        mixed *= 1.5
        return mixed


class OfAdapter(Model):
    """The adapter of a chunk, whose part is added to what a linear layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slots", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("a", OPS.pack_linear_weight(torch.randn(4, WIDTH))[None])
        self.register_buffer("b", OPS.pack_linear_weight(torch.randn(WIDTH, 2))[None])

    def mix(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        OPS.add_lora_(wide, x, self.slots, self.a, [self.b, self.b], 2, [WIDTH, WIDTH])
        mixed: Tensor = self.down(OPS.activate(wide, "silu", True))
        return mixed


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


@pytest.mark.parametrize("make", [OfRelu, OfExperts, OfAdapter])
@torch.inference_mode()
def test_rows_are_gathered_at_the_last_attention(make: type[Model]) -> None:
    torch.manual_seed(4)
    model, step = make(), inputs()
    program, table = lowered(model, step)
    gathers = [n for n in program.graph.nodes if n.target == "index_select"]
    bindings = dict(zip(program.graph.find_nodes(op="placeholder"), program.bindings, strict=True))
    sources = {bindings.get(n.args[0], op_name(n.args[0])) for n in gathers}
    assert sources <= {"rbln_emulator::self_attention", "input:x", "param:mask"}
    tensors = table.resolve_all(program.bindings, step)
    logits, hidden = model(*step.values())
    graph = EmulatedGraph(
        GraphSpec("prefill", TOKENS, prompts=3), program.graph, tensors, start_recording
    )
    packed = table.resolve_all(["packed:head.weight"], {})[0]
    for useful in (None, None, UsefulRows(31, 2), UsefulRows(31, 2, reads_hidden=False)):
        outputs = graph.run(useful)
        count, rows = (2, 31) if useful else (3, TOKENS)
        torch.testing.assert_close(outputs[0][:count], logits[:count])
        if useful is None or useful.reads_hidden:
            torch.testing.assert_close(outputs[1][:rows], hidden[:rows])
            whole = OPS.linear(outputs[1][step["ends"]], packed, None, VOCABULARY)
        # Hidden states that nobody reads may have given their memory to the logits' steps.
        assert torch.equal(outputs[0][:count], whole[:count])


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
        if useful is None or useful.reads_hidden:
            torch.testing.assert_close(outputs[1][:31], hidden[:31])


class OfWrites(Model):
    """Parts of a tensor, which later calls read as a whole, are written."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def mix(self, x: Tensor) -> Tensor:
        parts = torch.stack([super().mix(x), x], dim=-1)
        self.write(parts, x)
        return parts.sum(-1)


@pytest.mark.parametrize(
    "write",
    [
        lambda parts, x: parts.__setitem__((..., 1), x + x),
        lambda parts, x: operator.iadd(parts[..., 1], x),
        lambda parts, x: operator.isub(parts[..., 1], x * 2),
        lambda parts, x: operator.imul(parts[..., 1], 3),
        lambda parts, x: operator.itruediv(parts[..., 1], 3),
        lambda parts, x: parts[..., 1].mul_(3),
        lambda parts, x: parts.copy_(parts * 3),
    ],
)
@torch.inference_mode()
def test_rows_are_gathered_of_what_was_written(write: Callable[[Tensor, Tensor], object]) -> None:
    model, step = OfWrites(write), inputs()
    program, table = lowered(model, step)
    tensors = table.resolve_all(program.bindings, step)
    logits, _ = model(*step.values())
    spec = GraphSpec("prefill", TOKENS, prompts=3)
    for record in (None, start_recording):
        graph = EmulatedGraph(spec, program.graph, tensors, record)
        for useful in (None, UsefulRows(31, 2), UsefulRows(31, 2, reads_hidden=False)):
            outputs = graph.run(useful)
            count = 2 if useful else 3
            torch.testing.assert_close(outputs[0][:count], logits[:count])


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


# ----------------------------------------------------------------------------------------- recorder
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


def recorder_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    packed = OPS.pack_linear_weight(torch.randn(12, 8))
    return torch.randn(3, 8), torch.randn(8), packed, torch.zeros(2, 8)


def test_later_runs_compute_what_an_interpreted_run_computes() -> None:
    recorded, interpreted = recorder_inputs(), recorder_inputs()
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
    # They write to the same memory.
    first = [output.data_ptr() for output in graph.run()]
    assert [output.data_ptr() for output in graph.run()] == first


def test_a_graph_prepared_without_computing_runs_like_any_other() -> None:
    prepared, interpreted = recorder_inputs(), recorder_inputs()
    graph = graph_over(*prepared, recorded=True)
    prepared[0].fill_(torch.nan)
    graph.prepare()
    assert graph._steps
    prepared[0].copy_(interpreted[0])
    expected = graph_over(*interpreted, recorded=False).run()
    assert all(torch.equal(x, y) for x, y in zip(graph.run(), expected, strict=True))


def test_two_graphs_in_one_arena_do_not_disturb_each_other() -> None:
    a, b = recorder_inputs(), recorder_inputs()
    b[0].mul_(3)
    graphs = [graph_over(*tensors, recorded=True) for tensors in (a, b)]
    expected = [graph_over(*t, recorded=False).run() for t in (a, b)]
    for _ in range(2):
        for graph, values in zip(graphs, expected, strict=True):
            outputs = graph.run()
            assert all(torch.equal(x, y) for x, y in zip(outputs, values, strict=True))


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_an_embedding_is_repeated_by_the_kernels_alone(dtype: torch.dtype) -> None:
    model = nn.Embedding(9, 6).to(dtype)
    step = {"x": torch.tensor([[3], [0], [8]])}
    table = TensorTable(OPS.pack_linear_weight)
    table.add_model(model)
    program = lower_graph(
        capture(lambda x: model(x.view(-1)), (*step.values(),), table, step), pack_linear=True
    )
    tensors = table.resolve_all(program.bindings, step)
    graph = EmulatedGraph(GraphSpec("decode", 3), program.graph, tensors, start_recording)
    for rows in ([3, 0, 8], [8, 8, 1]):
        step["x"][:, 0] = torch.tensor(rows)
        assert torch.equal(graph.run()[0], model.weight[rows])
    assert graph._is_native
    step["x"][1] = 9
    with pytest.raises(RuntimeError, match="row 9 of 9"):
        graph.run()


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
