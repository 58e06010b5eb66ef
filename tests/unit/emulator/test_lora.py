"""The adapter op: values, whose rows it touches, and bits that do not depend on the company."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from rbln_backend.core import GraphSpec
from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.compiler import EmulatedGraph
from rbln_backend.devices.emulated.kernel_set import set_threads, start_recording
from rbln_backend.devices.emulated.packing import pack_reference
from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts
from tests.unit.emulator.test_moe import ACTIVATIONS, Experts

OPS = torch.ops.rbln_emulator
SLOTS = 3


class Layer:
    """A projection of several output slices with an adapter of full rank in each slot."""

    def __init__(self, inputs: int, outputs: list[int], rank: int, dtype: torch.dtype) -> None:
        self.inputs, self.outputs, self.rank, self.dtype = inputs, outputs, rank, dtype
        count = len(outputs)
        self.down = (torch.randn(SLOTS, count * rank, inputs) * inputs**-0.5).to(dtype)
        self.up = [(torch.randn(SLOTS, size, rank) * rank**-0.5).to(dtype) for size in outputs]
        self.a = torch.stack([pack_reference(matrix) for matrix in self.down])
        self.b = [torch.stack([pack_reference(matrix) for matrix in stack]) for stack in self.up]

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        y, x = torch.randn(count, sum(self.outputs)), torch.randn(count, self.inputs)
        return y.to(self.dtype), x.to(self.dtype)

    def arguments(self, y: Tensor, x: Tensor, slots: list[int]) -> tuple[object, ...]:
        chosen = torch.tensor(slots, dtype=torch.int32)
        return y, x, chosen, self.a, self.b, self.rank, self.outputs

    def added(self, y: Tensor, x: Tensor, slots: list[int]) -> Tensor:
        """Return the new y; the given one stays."""
        result = y.clone()
        OPS.add_lora_(*self.arguments(result, x, slots))
        return result

    def expected(self, y: Tensor, x: Tensor, slots: list[int]) -> Tensor:
        """The same in float64, but for the rounding of what lies between the two products."""
        rows, length = [], len(x) // len(slots)
        for r, (before, row) in enumerate(zip(y.double(), x.double(), strict=True)):
            slot = slots[r // length]
            if slot < 0:
                rows.append(before)
                continue
            hidden = (self.down[slot].double() @ row).to(self.dtype).double()
            parts = [
                up[slot].double() @ part
                for up, part in zip(self.up, hidden.split(self.rank), strict=True)
            ]
            rows.append(before + torch.cat(parts))
        return torch.stack(rows)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    # Three roundings: between the products, of their result, of the sum.
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=2 * step, atol=16 * step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"),
    [(64, [48], 16), (65, [100, 20, 20], 8), (7, [33], 1), (300, [40, 41], 32)],
)
@pytest.mark.parametrize("slots", [[2], [-1], [0, 0, 0, 0], [1, -1, 0, 1, 2, -1], [-1, 2, -1]])
def test_equals_float64(
    inputs: int, outputs: list[int], rank: int, slots: list[int], dtype: torch.dtype
) -> None:
    layer = Layer(inputs, outputs, rank, dtype)
    # One slot stands for a chunk, several for one token of each request.
    y, x = layer.rows(37 if len(slots) == 1 else len(slots))
    assert_close(layer.added(y, x, slots), layer.expected(y, x, slots))
    plain = y.clone()
    fallback.add_lora_(*layer.arguments(plain, x, slots))
    assert_close(layer.added(y, x, slots), plain.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_an_adapter_keep_their_bits(dtype: torch.dtype) -> None:
    layer = Layer(64, [48, 16], 8, dtype)
    y, x = layer.rows(6)
    x[1] = float("nan")
    result = layer.added(y, x, [0, -1, 2, -1, 0, -1])
    assert torch.equal(result[[1, 3, 5]], y[[1, 3, 5]])
    assert not result.isnan().any()
    assert not (result[[0, 2, 4]] == y[[0, 2, 4]]).all(-1).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_has_the_bits_it_has_alone(dtype: torch.dtype) -> None:
    layer = Layer(130, [70, 17], 16, dtype)
    y, x = layer.rows(40)
    slots = [(7 * r) % (SLOTS + 1) - 1 for r in range(40)]
    alone = torch.cat([layer.added(y[r : r + 1], x[r : r + 1], [slots[r]]) for r in range(40)])
    for rows in (1, 2, 3, 8, 33, 40):
        assert torch.equal(layer.added(y[:rows], x[:rows], slots[:rows]), alone[:rows])
    # A chunk of one request.
    chunk = torch.cat([layer.added(y[r : r + 1], x[r : r + 1], [1]) for r in range(40)])
    assert torch.equal(layer.added(y, x, [1]), chunk)


def test_threads_do_not_change_a_bit() -> None:
    layer = Layer(700, [600, 300], 32, torch.bfloat16)
    y, x = layer.rows(70)
    one, two = for_thread_counts(lambda: layer.added(y, x, [2]))
    assert torch.equal(one, two)


def test_opcheck() -> None:
    layer = Layer(32, [16, 16], 8, torch.float32)
    torch.library.opcheck(OPS.add_lora_.default, layer.arguments(*layer.rows(4), [0, -1, 1, 2]))


def test_a_recorded_run_reads_slots_and_weights_anew() -> None:
    layer = Layer(32, [16, 20], 8, torch.float32)
    y, x = layer.rows(4)
    slots = torch.full((4,), -1, dtype=torch.int32)

    def computation(
        y: Tensor, x: Tensor, slots: Tensor, packed: Tensor, a: Tensor, b: Tensor, c: Tensor
    ) -> tuple[Tensor]:
        out = OPS.linear.default(y, packed, None, 36)
        OPS.add_lora_.default(out, x, slots, a, [b, c], 8, [16, 20])
        return (out,)

    graph = fx.symbolic_trace(computation).graph
    tensors = (y, x, slots, OPS.pack_linear_weight(torch.eye(36)), layer.a, *layer.b)
    run = EmulatedGraph(GraphSpec("decode", 4), graph, tensors, start_recording).run
    with torch.inference_mode():
        assert torch.equal(run()[0], y)
        for chosen in ([0, -1, 2, 2], [-1, -1, -1, -1], [1, 1, 1, 1]):
            slots.copy_(torch.tensor(chosen))
            assert torch.equal(run()[0], layer.added(y, x, chosen))
        layer.a[1].zero_()
        assert torch.equal(run()[0], y)
    slots[2] = SLOTS
    with pytest.raises(RuntimeError, match=f"slots\\[2\\] is {SLOTS}"):
        run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: torch.zeros(4)}, "not int32"),
        ({2: torch.zeros(3, dtype=torch.int32)}, "over 4 rows"),
        ({0: torch.zeros(4, 37)}, r"y has shape \[4, 37\]"),
        ({0: torch.zeros(4, 36, dtype=torch.bfloat16)}, "y has dtype"),
        ({5: 16}, "a has shape"),
        ({6: [16, 40]}, "b has shape"),
        ({6: [36]}, "2 slices for 1 out_features"),
        ({2: torch.full((4,), 3, dtype=torch.int32)}, r"slots\[0\] is 3"),
        ({2: torch.full((4,), -2, dtype=torch.int32)}, r"slots\[0\] is -2"),
    ],
)
def test_wrong_arguments_are_named(change: dict[int, object], message: str) -> None:
    layer = Layer(32, [16, 20], 8, torch.float32)
    arguments = list(layer.arguments(*layer.rows(4), [0, 1, 2, -1]))
    for place, value in change.items():
        arguments[place] = value
    set_threads(1)
    with pytest.raises((RuntimeError, IndexError), match=message):
        OPS.add_lora_(*arguments)


# ----------------------------------------------------------------------------------------- moe lora
EXPERT_SLOTS, RANK, ROWS, TOP_K = 3, 6, 12, 2


class AdaptedExperts(Experts):
    """Experts with an adapter in each slot, added to the weights or given to the op."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inner, outer = self.intermediate_size, self.hidden_size
        slices = 1 if self.activation == "swigluoai" else 2
        self.down13 = self._stack(slices * RANK, outer)
        self.up13 = [self._stack(2 * inner // slices, RANK) for _ in range(slices)]
        self.down2, self.up2 = self._stack(RANK, inner), self._stack(outer, RANK)

    def _stack(self, outputs: int, inputs: int) -> Tensor:
        """[E, S, outputs, inputs]"""
        return self._made(self.count, EXPERT_SLOTS, outputs, inputs) * inputs**-0.5

    def lora(self, slots: list[int]) -> tuple[Any, ...]:
        packed = [
            torch.stack([torch.stack([pack_reference(m) for m in slot]) for slot in stack])
            for stack in (self.down13, *self.up13, self.down2, self.up2)
        ]
        if len(self.up13) == 1:
            packed.insert(2, None)  # type: ignore[arg-type]
        return torch.tensor(slots, dtype=torch.int32), *packed, RANK

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor, slots: list[int]) -> Tensor:
        result: Tensor = OPS.moe(x, weights, ids, *self.arguments(), *self.lora(slots))
        return result

    def merged(self, slot: int) -> Experts:
        """Experts in float64 whose weights have the adapter of ``slot`` added."""
        names = ("count", "hidden_size", "intermediate_size", "activation")
        plain = Experts(dtype=torch.float64, **{name: getattr(self, name) for name in names})
        lower = self.down13[:, slot].double().split(RANK, dim=1)
        first = [up[:, slot].double() @ a for up, a in zip(self.up13, lower, strict=True)]
        second = self.up2[:, slot].double() @ self.down2[:, slot].double()
        plain.w13 = self.w13.double() + torch.cat(first, dim=1)
        plain.w2 = self.w2.double() + second
        assert self.w13_bias is not None
        assert self.w2_bias is not None
        plain.w13_bias, plain.w2_bias = self.w13_bias.double(), self.w2_bias.double()
        return plain


def routed(count: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Random weights and distinct ids [rows, TOP_K], now and then no expert."""
    ids = torch.stack([torch.randperm(count)[:TOP_K] for _ in range(rows)]).int()
    ids[rows // 2, 0] = -1
    return torch.rand(rows, TOP_K), ids


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("slots", [[2], [-1, 1, 0], [0, 1, 2, -1] * 3])
def test_equals_merged_weights(activation: str, slots: list[int]) -> None:
    experts = AdaptedExperts(activation=activation)
    x, (weights, ids) = experts.rows(ROWS), routed(experts.count)
    actual = experts.mixed(x, weights, ids, slots)
    plain = OPS.moe(x, weights, ids, *experts.arguments())
    for row in range(ROWS):
        slot = slots[row * len(slots) // ROWS]
        one = slice(row, row + 1)
        if slot < 0:
            assert torch.equal(actual[one], plain[one])
            continue
        expected = experts.merged(slot).expected(x[one], weights[one], ids[one])
        assert_near(actual[one], expected)
        assert not torch.allclose(actual[one].double(), plain[one].double(), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_expert_lora_every_row_has_the_bits_it_has_alone(
    activation: str, dtype: torch.dtype
) -> None:
    experts = AdaptedExperts(activation=activation, dtype=dtype)
    x, (weights, ids) = experts.rows(ROWS), routed(experts.count)
    slots = [row % (EXPERT_SLOTS + 1) - 1 for row in range(ROWS)]
    together = experts.mixed(x, weights, ids, slots)
    alone = [
        experts.mixed(x[row : row + 1], weights[row : row + 1], ids[row : row + 1], [slots[row]])
        for row in range(ROWS)
    ]
    assert torch.equal(together, torch.cat(alone))
    one, two = for_thread_counts(lambda: experts.mixed(x, weights, ids, slots))
    assert torch.equal(one, two)


def test_both_ways_to_choose_and_the_pytorch_body_agree() -> None:
    experts = AdaptedExperts()
    x, (weights, ids) = experts.rows(ROWS), routed(experts.count)
    slots = [1, -1, 2]
    mixed = experts.mixed(x, weights, ids, slots)
    table = torch.zeros(ROWS, experts.count + 1).scatter(
        1, ids.long() % (experts.count + 1), weights
    )
    table = table[:, :-1].contiguous()
    counts = (table != 0).sum(dim=0, dtype=torch.int32)
    arguments = (*experts.arguments(), *experts.lora(slots))
    assert torch.equal(OPS.moe_masked(x, table, counts, *arguments), mixed)
    torch.testing.assert_close(fallback.moe(x, weights, ids, *arguments), mixed)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(5, dtype=torch.int32), "over 12 rows"),
        (0, torch.full((12,), EXPERT_SLOTS, dtype=torch.int32), rf"slots\[0\] is {EXPERT_SLOTS}"),
        (3, None, "wrong slices"),
        (4, torch.zeros(5, 3, 1, 23, 16), "a has shape"),
        (6, 0, "without a rank"),
    ],
)
def test_expert_lora_wrong_arguments_are_named(place: int, value: object, message: str) -> None:
    experts = AdaptedExperts()
    x, (weights, ids) = experts.rows(ROWS), routed(experts.count)
    given = list(experts.lora([0]))
    given[place] = value
    with pytest.raises((RuntimeError, IndexError), match=message):
        OPS.moe(x, weights, ids, *experts.arguments(), *given)
