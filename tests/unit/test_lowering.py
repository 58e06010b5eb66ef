"""Rewrites for the emulated device keep what a graph computes."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from rbln_backend.devices.emulated.kernel_set import active_isa
from rbln_backend.devices.emulated.lowering import fold_constants, lower_graph
from rbln_backend.devices.emulated.packing import pack, pack_consuming, pack_reference
from rbln_backend.errors import CompileError
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable
from rbln_backend.layers.attention_ops import AttentionOptions, EmulatedAttention
from rbln_backend.worker.graph_factory import named_tensors

pytestmark = pytest.mark.usefixtures("native_kernels")


class Layer(nn.Module):
    """A linear, a cast to the dtype it has, and an output buffer filled by one copy."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.projection(x).to(torch.float32)
        buffer = torch.empty(x.shape[0], 6)
        buffer.view(-1, 2, 3).copy_(hidden.view(-1, 2, 3) * 2)
        return buffer.view(-1, 6) + 1


def captured() -> tuple[Layer, TensorTable, Tensor, Program]:
    layer, x = Layer(), torch.randn(3, 4)
    table = TensorTable(lambda weight: weight.clone())
    table.add_model(layer)
    return layer, table, x, capture(layer, (x,), table, {"x": x})


def targets(program: Program) -> list[str]:
    calls = [node for node in program.graph.nodes if node.op.startswith("call")]
    return [str(getattr(node.target, "__name__", node.target)) for node in calls]


def make_result(program: Program, table: TensorTable, **step: Tensor) -> Tensor:
    tensors = table.resolve_all(program.bindings, step)
    with torch.inference_mode():
        result: Tensor = fx.GraphModule({}, program.graph)(*tensors)[0]
    return result


def test_buffers_and_casts_disappear_and_the_result_stays() -> None:
    layer, table, x, program = captured()
    lowered = lower_graph(program, pack_linear=False)
    assert not {"copy_", "to"} & set(targets(lowered))
    torch.testing.assert_close(make_result(lowered, table, x=x), layer(x))


def test_the_captured_program_is_left_alone() -> None:
    _, _, _, program = captured()
    before = program.to_bytes()
    lower_graph(program, pack_linear=False)
    assert program.to_bytes() == before
    assert "copy_" in targets(program)


def test_a_write_is_never_dead_code() -> None:
    x, log = torch.randn(3), torch.zeros(3)
    table = TensorTable(lambda weight: weight)
    table.add("param:log", log)

    def step(x: Tensor) -> Tensor:
        log.copy_(x * 2)
        return x + 1

    lowered = lower_graph(capture(step, (x,), table, {"x": x}), pack_linear=True)
    make_result(lowered, table, x=x)
    torch.testing.assert_close(log, x * 2)


def test_a_graph_break_is_refused() -> None:
    def breaks(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1

    x = torch.randn(3)
    with pytest.raises(CompileError, match="one static graph"):
        capture(breaks, (x,), TensorTable(lambda w: w), {"x": x})


def test_only_weights_the_kernels_can_multiply_by_are_packed() -> None:
    layer, x = nn.Linear(4, 6, bias=False).to(torch.float64), torch.randn(3, 4).double()
    table = TensorTable(lambda weight: weight)
    table.add_model(layer)
    lowered = lower_graph(capture(layer, (x,), table, {"x": x}), pack_linear=True)
    assert sorted(lowered.bindings) == ["input:x", "param:weight"]


def test_packed_linears_compute_the_same() -> None:
    layer, table, x, program = captured()
    table = TensorTable(pack, pack_consuming)
    table.add_model(layer)
    lowered = lower_graph(program, pack_linear=True)
    assert "packed:projection.weight" in lowered.bindings
    assert "param:projection.weight" not in lowered.bindings
    expected = layer(x)
    table.pack_weights(lowered.bindings)
    torch.testing.assert_close(make_result(lowered, table, x=x), expected)
    # The plain copy goes once nothing reads it; its shape stays for a later capture.
    assert layer.projection.weight.shape == (6, 4)
    assert layer.projection.weight.untyped_storage().nbytes() == 4
    with pytest.raises(CompileError, match="only the packed form was kept"):
        table.resolve("param:projection.weight", {})


def test_a_weight_with_one_reader_is_packed_where_it_lies() -> None:
    layer = nn.Linear(8, 32, bias=False)
    table = TensorTable(pack, pack_consuming)
    table.add_model(layer)
    plain, address = layer.weight.detach().clone(), layer.weight.data_ptr()
    table.pack_weights(["packed:weight", "input:x"])
    packed = table.resolve("packed:weight", {})
    assert packed.data_ptr() == address
    assert torch.equal(packed, pack_reference(plain))


def test_a_worker_codes_the_weights_of_linears_alone() -> None:
    model = nn.ModuleDict({"one": nn.Linear(64, 32, bias=False), "two": nn.Linear(64, 32)})
    model = model.bfloat16()
    x = torch.randn(3, 64).bfloat16()
    expected, bias = model["one"](x), model["two"].bias.detach().clone()
    table = named_tensors(model, {}, SimpleNamespace(tensors={}), None)  # type: ignore[arg-type]
    table.pack_weights(["packed:one.weight", "param:two.weight", "param:two.bias"])
    weight = table.resolve("packed:one.weight", {})
    assert weight.dtype == (torch.uint8 if active_isa().startswith("avx512") else torch.bfloat16)
    torch.testing.assert_close(torch.ops.rbln_emulator.linear(x, weight, None, 32), expected)
    assert table.resolve("param:two.weight", {}).dtype == torch.bfloat16
    assert torch.equal(table.resolve("param:two.bias", {}), bias)


@pytest.mark.parametrize("shared", ["read by a program", "a view of another parameter"])
def test_a_weight_with_two_readers_is_copied(shared: str) -> None:
    model = nn.Module()
    model.head = nn.Linear(8, 32, bias=False)
    programs = ["packed:head.weight"]
    if shared == "read by a program":
        programs.append("param:head.weight")
    else:
        model.embedding = nn.Parameter(model.head.weight.data.view(16, 16))
    table = TensorTable(pack, pack_consuming)
    table.add_model(model)
    plain = model.head.weight.detach().clone()
    table.pack_weights(programs)
    assert torch.equal(table.resolve("packed:head.weight", {}), pack_reference(plain))
    assert torch.equal(table.resolve("param:head.weight", {}), plain)


class Gates(nn.Module):
    """As routers and shared experts write them; the last three have no kernel."""

    def forward(self, x: Tensor) -> Tensor:
        known = torch.sigmoid(x) + x.sigmoid() + functional.silu(x) + functional.softplus(x)
        return known + functional.softplus(x, 2.0) + torch.tanh(x) + torch.sigmoid(x.int()).float()


def test_gates_have_the_same_bits_in_every_batch() -> None:
    """ATen's differ between the body of its vector loop and what is left at the end."""
    x = torch.randn(64, 7)
    program = capture(Gates(), (x,), TensorTable(lambda weight: weight), {"x": x})
    lowered = lower_graph(program, pack_linear=True)
    assert targets(lowered).count("activate.default") == 4
    expected, at_once = Gates()(x), fx.GraphModule({}, lowered.graph)(x)[0]
    torch.testing.assert_close(at_once, expected)
    kernels = [n.args[1] for n in lowered.graph.nodes if "activate" in str(n.target)]
    for function in kernels:
        at_once = torch.ops.rbln_emulator.activate(x, function, False)
        for rows in (1, 2, 3, 16):
            alone = torch.ops.rbln_emulator.activate(x[:rows], function, False)
            assert torch.equal(alone, at_once[:rows])


# ------------------------------------------------------------------------------- attention lowering
KV_HEADS, GROUP, HEAD_SIZE, WIDTH = 2, 2, 32, 48
Q, KV = KV_HEADS * GROUP * HEAD_SIZE, KV_HEADS * HEAD_SIZE


class AttentionLayer(nn.Module):
    """Merged projection, norms of the heads, rotation, attention into a buffer, output."""

    def __init__(self, *, norms: bool, rotates: bool, window: bool, custom: bool = False) -> None:
        super().__init__()
        self.norms, self.rotates, self.window = norms, rotates, window
        self.qkv = nn.Linear(WIDTH, Q + 2 * KV, bias=False)
        self.out = nn.Linear(Q, WIDTH, bias=False)
        self.q_norm, self.k_norm = (nn.Parameter(torch.randn(HEAD_SIZE)) for _ in "qk")
        self.register_buffer("rotary", torch.randn(20, HEAD_SIZE))
        self.register_buffer("scale", torch.tensor(HEAD_SIZE**-0.5))
        shape = (4, 2, KV_HEADS, 1, 16, HEAD_SIZE)
        self.register_buffer("cache", torch.randn(shape).transpose(0, int(custom)).contiguous())
        self.attention = EmulatedAttention(AttentionOptions(), use_custom_kernel=custom)

    def forward(self, x: Tensor, positions: Tensor, starts: Tensor, tables: Tensor) -> Tensor:
        ops, batch = torch.ops.rbln_emulator, starts.shape[0]
        q, k, v = self.qkv(x).split([Q, KV, KV], dim=-1)
        if self.norms:
            q = ops.rms_norm(q.view(*q.shape[:-1], -1, HEAD_SIZE), self.q_norm, 1e-6).view(q.shape)
            k = ops.rms_norm(k.view(*k.shape[:-1], -1, HEAD_SIZE), self.k_norm, 1e-6).view(k.shape)
        if self.rotates:
            q, k = ops.rotary_embedding(positions, q, k, self.rotary, HEAD_SIZE, True)
        output = torch.empty(x.shape[0], Q, dtype=x.dtype)
        output = output.view(-1, KV_HEADS * GROUP, HEAD_SIZE)
        heads = [t.view(-1, t.shape[-1] // HEAD_SIZE, HEAD_SIZE) for t in (q, k, v)]
        q, k, v = (
            t.view(batch, -1, KV_HEADS, t.shape[1] // KV_HEADS, HEAD_SIZE).permute(0, 2, 3, 1, 4)
            for t in heads
        )
        common = {"q": q, "k": k, "v": v, "kv_cache": self.cache, "scale": self.scale}
        common |= {"block_tables": tables, "is_prefill": False}
        if self.window:
            result = self.attention.shifted_window(
                cache_seq_len=starts, cache_offset=starts + 1, **common
            )
        else:
            result = self.attention.causal(seq_idx=starts, one_block=False, **common)
        output.copy_(result.permute(0, 3, 1, 2, 4).reshape(output.shape))
        projected: Tensor = self.out(output.view(-1, Q))
        return projected


def inputs() -> dict[str, Tensor]:
    return {
        "x": torch.randn(3, WIDTH),
        "positions": torch.tensor([5, 0, 7]),
        "starts": torch.tensor([[5], [0], [7]], dtype=torch.int32),
        "tables": torch.tensor([[1], [2], [3]], dtype=torch.int32),
    }


def run(program: Program, layer: AttentionLayer, step: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The result over a cache of its own, and that cache afterwards."""
    table = TensorTable(torch.ops.rbln_emulator.pack_linear_weight)
    table.add_model(layer)
    cache = layer.cache.clone()
    table.add("param:cache", cache)
    return make_result(program, table, **step), cache


def lowered_pair(layer: AttentionLayer, step: dict[str, Tensor]) -> tuple[Program, Program]:
    """The program with packed linears, and the same with nothing else done to it."""
    table = TensorTable(torch.ops.rbln_emulator.pack_linear_weight)
    table.add_model(layer)
    program = capture(layer, tuple(step.values()), table, step)
    return program, lower_graph(program, pack_linear=True)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_a_layer_becomes_one_call(window: bool, norms: bool, rotates: bool) -> None:
    layer, step = AttentionLayer(norms=norms, rotates=rotates, window=window), inputs()
    captured, lowered = lowered_pair(layer, step)
    left = [name for name in targets(lowered) if name != "add"]
    assert left == ["linear.default", "self_attention.default", "linear.default"]
    expected, expected_cache = run(captured, layer, step)
    actual, cache = run(lowered, layer, step)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(cache, expected_cache)
    stored = Program.from_bytes(lowered.to_bytes())
    again, _ = run(stored, layer, step)
    assert torch.equal(again, actual)


def test_caches_of_another_layout_keep_their_op() -> None:
    layer, step = (AttentionLayer(norms=False, rotates=True, window=False, custom=True), inputs())
    captured, lowered = lowered_pair(layer, step)
    assert "self_attention.default" not in targets(lowered)
    torch.testing.assert_close(run(lowered, layer, step)[0], run(captured, layer, step)[0])


class RotatedFirst(AttentionLayer):
    """The norm of the heads comes after their rotation."""

    def forward(self, x: Tensor, positions: Tensor, starts: Tensor, tables: Tensor) -> Tensor:
        ops = torch.ops.rbln_emulator
        q, k, v = self.qkv(x).split([Q, KV, KV], dim=-1)
        q, k = ops.rotary_embedding(positions, q, k, self.rotary, HEAD_SIZE, True)
        q = ops.rms_norm(q.view(3, -1, HEAD_SIZE), self.q_norm, 1e-6)
        k = ops.rms_norm(k.view(3, -1, HEAD_SIZE), self.k_norm, 1e-5)
        q, k, v = (t.view(3, 1, KV_HEADS, -1, HEAD_SIZE).permute(0, 2, 3, 1, 4) for t in (q, k, v))
        common = {"kv_cache": self.cache, "scale": self.scale, "block_tables": tables}
        result = self.attention.causal(
            q=q, k=k, v=v, seq_idx=starts, is_prefill=False, one_block=False, **common
        )
        projected: Tensor = self.out(result.permute(0, 3, 1, 2, 4).reshape(3, Q))
        return projected


def test_what_is_done_in_another_order_stays_in_it() -> None:
    layer, step = RotatedFirst(norms=True, rotates=True, window=False), inputs()
    captured, lowered = lowered_pair(layer, step)
    assert {"rms_norm", "rotary_embedding"} <= set(targets(lowered))
    torch.testing.assert_close(run(lowered, layer, step)[0], run(captured, layer, step)[0])


# -------------------------------------------------------------------------------------------- views
class Activated(nn.Module):
    """Functions of PyTorch that have a kernel, and views that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        shaped = self.norm(x).view(2, -1, 6).reshape(-1, 6)[..., :6]
        once = nn.functional.gelu(shaped, approximate="tanh").view(2, 3, 2, 3)
        return nn.functional.gelu(once.view(2, 3, 6).view(2, 18)).permute(1, 0).permute(1, 0)


def test_functions_become_kernels_and_idle_views_go() -> None:
    layer, x = Activated(), torch.randn(6, 6)
    table = TensorTable(lambda weight: weight)
    table.add_model(layer)
    program = capture(layer, (x,), table, {"x": x})
    lowered = lower_graph(program, pack_linear=True)
    kernels = [name.rpartition(".")[0] for name in targets(lowered)]
    assert kernels == ["layer_norm", "activate", "", "activate"]
    torch.testing.assert_close(make_result(lowered, table, x=x), layer(x))


def test_views_of_a_copy_and_reordered_rows_stay() -> None:
    x, order = torch.randn(4, 6), torch.tensor([2, 0, 3, 1])
    table = TensorTable(lambda weight: weight)
    table.add("param:order", order)

    def step(x: Tensor) -> Tensor:
        turned = x.permute(1, 0).reshape(4, 6)
        return turned.view(6, 4).permute(1, 0)[order]

    lowered = lower_graph(capture(step, (x,), table, {"x": x}), pack_linear=False)
    assert torch.equal(make_result(lowered, table, x=x), step(x))


def test_a_buffer_read_before_its_copy_stays() -> None:
    x = torch.randn(4, 6)

    def step(x: Tensor) -> Tensor:
        buffer = torch.empty(4, 6)
        buffer.view(-1).fill_(1.0)
        before = buffer.view(6, 4) + 1
        buffer.copy_(x)
        return before + buffer.view(6, 4)

    lowered = lower_graph(capture(step, (x,), TensorTable(lambda w: w), {"x": x}), pack_linear=True)
    assert "copy_" in targets(lowered)
    assert torch.equal(fx.GraphModule({}, lowered.graph)(x)[0], step(x))


# ---------------------------------------------------------------------------------------- constants
def folded(model: nn.Module, x: Tensor) -> tuple[list[str], Callable[[], Tensor]]:
    """The calls that are left of the captured model, and the model that makes them."""
    table = TensorTable(lambda weight: weight)
    table.add_model(model)
    program = capture(model, (x,), table, {"x": x})
    before = program.to_bytes()
    graph, tensors = fold_constants(program, table.resolve_all(program.bindings, {"x": x}))
    assert program.to_bytes() == before
    calls = [str(getattr(n.target, "__name__", n.target)) for n in graph.nodes if "call" in n.op]
    run = fx.GraphModule({}, graph)
    return calls, lambda: run(*tensors)[0]


class Scaled(nn.Module):
    """A scale stored less one, as Gemma's norms have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight.float() + 1.0)


@pytest.mark.parametrize(
    ("width", "left"), [(8, ["mul"]), (1 << 18, ["float", "add", "mul"])], ids=["small", "large"]
)
def test_arithmetic_over_small_weights_is_done_once(width: int, left: list[str]) -> None:
    model, x = Scaled(width), torch.randn(1, width)
    calls, run = folded(model, x)
    assert calls == left
    assert torch.equal(run(), model(x))
    x.mul_(2)
    assert torch.equal(run(), model(x))


class Written(Scaled):
    """A copy of a weight that the step writes to."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.float() + 1.0
        scale.view(-1).add_(x[0])
        return scale * 2


def test_what_is_written_in_place_is_computed_at_every_step() -> None:
    model, x = Written(8), torch.randn(3, 8)
    _, run = folded(model, x)
    for _ in range(2):
        assert torch.equal(run(), model(x))
