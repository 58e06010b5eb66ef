"""Routing and experts: values, which experts are read, bits that no other row changes."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.packing import pack_reference
from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts

OPS = torch.ops.rbln_emulator
ACTIVATIONS = ("silu", "swigluoai")


@dataclass(kw_only=True)
class Experts:
    dtype: torch.dtype = torch.float32
    count: int = 5
    hidden_size: int = 40
    intermediate_size: int = 24
    has_bias: bool = True
    activation: str = "silu"
    spread: float = 1.0  # of the gate and up projections
    w13: Tensor = field(init=False)
    w13_bias: Tensor | None = None
    w2: Tensor = field(init=False)
    w2_bias: Tensor | None = None

    def __post_init__(self) -> None:
        hidden, inner = self.hidden_size, self.intermediate_size
        self.w13 = self._made(self.count, 2 * inner, hidden) * (self.spread * hidden**-0.5)
        self.w2 = self._made(self.count, hidden, inner) * inner**-0.5
        if self.has_bias:
            self.w13_bias = self._made(self.count, 2 * inner)
            self.w2_bias = self._made(self.count, hidden)

    def _made(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.dtype)

    def rows(self, count: int) -> Tensor:
        return self._made(count, self.hidden_size)

    def arguments(self, *, packed: bool = True) -> tuple[object, ...]:
        """Everything of a call after x, weights and ids."""
        w13, w2 = (
            torch.stack([pack_reference(matrix) for matrix in stacked]) if packed else stacked
            for stacked in (self.w13, self.w2)
        )
        return w13, self.w13_bias, w2, self.w2_bias, self.intermediate_size, self.activation

    def expected(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Every expert for every row, in float64; rounds where the op rounds."""
        x = x.double()
        total = torch.zeros_like(x)
        for expert in range(self.count):
            share = torch.where(ids == expert, weights.double(), 0.0).sum(dim=-1, keepdim=True)
            gate_up = x @ self.w13[expert].double().T
            if self.w13_bias is not None:
                gate_up += self.w13_bias[expert].double()
            inner = self._gated(gate_up.to(self.dtype).double()).to(self.dtype).double()
            out = inner @ self.w2[expert].double().T
            if self.w2_bias is not None:
                out += self.w2_bias[expert].double()
            total += share * out.to(self.dtype).double()
        return total

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.activation == "silu":
            gate, up = gate_up.chunk(2, dim=-1)
            return gate / (1 + (-gate).exp()) * up
        gate, up = gate_up[:, ::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
        return gate / (1 + (-1.702 * gate).exp()) * (up + 1)


def route(rows: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    weights, ids = OPS.moe_route(torch.randn(rows, experts), top_k, True)
    return weights, ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2), (8, 8), (33, 5), (128, 8)])
def test_routing(experts: int, top_k: int, renormalize: bool, dtype: torch.dtype) -> None:
    # Distinct in every dtype, so that the order is certain.
    ladder = torch.linspace(-4, 4, 2 * experts)
    logits = torch.stack([ladder[torch.randperm(2 * experts)[:experts]] for _ in range(9)])
    logits = logits.to(dtype)
    weights, ids = OPS.moe_route(logits, top_k, renormalize)
    probabilities = logits.double().softmax(dim=-1)
    best, expected_ids = probabilities.topk(top_k, dim=-1)
    if renormalize:
        best = best / best.sum(dim=-1, keepdim=True)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids.long(), expected_ids)
    assert_near(weights, best)


def test_equal_scores_go_to_the_lower_number_and_nan_to_any_valid_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [float("nan")] * 4, [2.0, 1.0, 0.0, -1.0]])
    weights, ids = OPS.moe_route(logits, 2, True)
    assert ids[0].tolist() == [1, 2]
    assert weights[0].tolist() == [0.5, 0.5]
    assert len(set(ids[1].tolist())) == 2
    assert set(ids[1].tolist()) <= set(range(4))
    assert weights[1].isnan().all()
    assert ids[2].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (33, 7, 3, 2), (64, 40, 20, 3), (130, 65, 70, 5)])
def test_equals_float64(
    sizes: tuple[int, int, int, int], has_bias: bool, activation: str, dtype: torch.dtype
) -> None:
    hidden, inner, rows, top_k = sizes
    form = {"dtype": dtype, "has_bias": has_bias, "activation": activation}
    layer = Experts(hidden_size=hidden, intermediate_size=inner, **form)
    x, (weights, ids) = layer.rows(rows), route(rows, layer.count, top_k)
    result = OPS.moe(x, weights, ids, *layer.arguments())
    # Inner values that lie on a rounding edge may go either way.
    slack = 3.0 if dtype == torch.float32 else 4000.0
    assert_near(result, layer.expected(x, weights, ids), scale=slack)


def test_the_limits_of_swigluoai_are_reached() -> None:
    layer = Experts(activation="swigluoai", spread=12.0)
    x, (weights, ids) = layer.rows(30), route(30, layer.count, 2)
    gate_up = x @ layer.w13[0].T
    assert (gate_up > 7).any()
    assert (gate_up < -7).any()
    result = OPS.moe(x, weights, ids, *layer.arguments())
    assert_near(result, layer.expected(x, weights, ids), scale=100.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_row_has_the_bits_it_has_alone(dtype: torch.dtype, activation: str) -> None:
    layer = Experts(dtype=dtype, activation=activation, hidden_size=100, intermediate_size=50)
    logits = torch.randn(70, layer.count).to(dtype)
    x, arguments = layer.rows(70), layer.arguments()

    def compute(rows: slice) -> Tensor:
        weights, ids = OPS.moe_route(logits[rows], 3, False)
        result: Tensor = OPS.moe(x[rows], weights, ids, *arguments)
        return result

    alone = torch.cat([compute(slice(i, i + 1)) for i in range(70)])
    for rows in (2, 3, 8, 33, 70):
        assert torch.equal(compute(slice(rows)), alone[:rows]), rows
    assert torch.equal(compute(slice(0, 70, 3)), alone[::3])


def test_threads_do_not_change_a_bit() -> None:
    layer = Experts(hidden_size=600, intermediate_size=300, dtype=torch.bfloat16)
    x, (weights, ids) = layer.rows(300), route(300, layer.count, 2)
    one, two = for_thread_counts(lambda: OPS.moe(x, weights, ids, *layer.arguments()))
    assert torch.equal(one, two)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_only_chosen_experts_are_read(activation: str) -> None:
    layer = Experts(count=6, activation=activation)
    x, weights = layer.rows(4), torch.full((4, 2), 0.5)
    ids = torch.tensor([[1, 4], [4, 1], [4, 2], [1, 2]], dtype=torch.int32)
    clean = OPS.moe(x, weights, ids, *layer.arguments())
    for stacked in (layer.w13, layer.w13_bias, layer.w2, layer.w2_bias):
        assert stacked is not None
        stacked[[0, 3, 5]] = float("nan")
    assert torch.equal(OPS.moe(x, weights, ids, *layer.arguments()), clean)
    plain = fallback.moe(x, weights, ids, *layer.arguments(packed=False))  # type: ignore[arg-type]
    assert not plain.isnan().any()


@pytest.mark.parametrize("route", [OPS.moe_route, fallback.moe_route])
def test_routing_names_experts_as_the_rank_does_and_skips_padding(route: Any) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
    here = torch.tensor([1, -1, 0], dtype=torch.int32)
    mask = torch.tensor([[1.0], [1.0], [0.0]])
    weights, ids = route(logits, 2, True, here, mask)
    assert ids.tolist() == [[1, -1], [0, -1], [-1, -1]]
    assert torch.equal(weights, OPS.moe_route(logits, 2, True)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_weights_by_expert_give_what_ids_give(dtype: torch.dtype, packed: bool) -> None:
    layer = Experts(dtype=dtype)
    x, (weights, ids) = layer.rows(20), route(20, layer.count, 3)
    ids[4], ids[7, 1], ids[9, 2] = -1, -1, -1
    columns = torch.where(ids < 0, layer.count, ids).long()
    table = torch.zeros(20, layer.count + 1).scatter(1, columns, weights)[:, :-1].contiguous()
    counts = (table != 0).sum(dim=0, dtype=torch.int32)
    expected = OPS.moe(x, weights, ids, *layer.arguments())
    assert not expected[4].any()
    assert torch.equal(OPS.moe_masked(x, table, counts, *layer.arguments()), expected)
    plain = fallback.moe_masked(x, table, counts, *layer.arguments(packed=packed))
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(plain, expected, rtol=4 * step, atol=1e-5 + 8 * step)


def test_experts_of_padding_are_not_read() -> None:
    layer = Experts(count=6)
    x, logits = layer.rows(3), torch.eye(6)[[1, 4, 2]] * 9
    mask = torch.tensor([[1.0], [1.0], [0.0]])
    for stacked in (layer.w13, layer.w2):
        stacked[[0, 2, 3, 5]] = float("nan")
    weights, ids = OPS.moe_route(logits, 1, True, None, mask)
    mixed = OPS.moe(x, weights, ids, *layer.arguments())
    assert not mixed.isnan().any()
    assert not mixed[2].any()


def test_a_nan_row_stays_alone() -> None:
    layer = Experts()
    x, logits = layer.rows(9), torch.randn(9, layer.count)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    clean = OPS.moe(x, *OPS.moe_route(logits, 2, True), *layer.arguments())
    x[4], logits[4] = float("nan"), float("nan")
    dirty = OPS.moe(x, *OPS.moe_route(logits, 2, True), *layer.arguments())
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed", [True, False])
def test_pytorch_bodies_agree_with_the_kernels(
    dtype: torch.dtype, activation: str, packed: bool
) -> None:
    layer = Experts(dtype=dtype, activation=activation, spread=6.0)
    x, logits = layer.rows(20), torch.randn(20, layer.count).to(dtype)
    for renormalize in (True, False):
        native, plain = (
            body(logits, 3, renormalize) for body in (OPS.moe_route, fallback.moe_route)
        )
        torch.testing.assert_close(native[0], plain[0], rtol=1e-5, atol=1e-7)
    weights, ids = route(20, layer.count, 3)
    expected = fallback.moe(x, weights, ids, *layer.arguments(packed=packed))  # type: ignore[arg-type]
    actual = OPS.moe(x, weights, ids, *layer.arguments())
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * step, atol=1e-5 + 8 * step)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.wide), torch.bfloat16]
)
def test_opcheck(dtype: torch.dtype) -> None:
    layer = Experts(dtype=dtype)
    logits = torch.randn(6, layer.count).to(dtype)
    torch.library.opcheck(OPS.moe_route.default, (logits[::2], 2, False))
    weights, ids = route(6, layer.count, 2)
    torch.library.opcheck(OPS.moe.default, (layer.rows(6), weights, ids, *layer.arguments()))
    table, counts = torch.rand(6, layer.count), torch.full((layer.count,), 6, dtype=torch.int32)
    arguments = (layer.rows(6), table, counts, *layer.arguments())
    torch.library.opcheck(OPS.moe_masked.default, arguments)


def test_strided_rows_and_no_rows() -> None:
    layer = Experts()
    x, (weights, ids) = layer.rows(6), route(6, layer.count, 2)
    plain = OPS.moe(x, weights, ids, *layer.arguments())
    wide = torch.full((6, 60), float("nan"))
    wide[:, 10:50] = x
    assert torch.equal(OPS.moe(wide[:, 10:50], weights, ids, *layer.arguments()), plain)
    assert torch.equal(OPS.moe(x.T.contiguous().T, weights, ids, *layer.arguments()), plain)
    assert OPS.moe(x[:0], weights[:0], ids[:0], *layer.arguments()).shape == (0, 40)


def test_mistakes_are_named() -> None:
    layer = Experts()
    x, (weights, ids) = layer.rows(3), route(3, layer.count, 2)
    arguments = [x, weights, ids, *layer.arguments()]
    with pytest.raises(RuntimeError, match="top_k 6 of 5 experts"):
        OPS.moe_route(torch.randn(3, 5), 6, True)
    wrong, twice = ids.clone(), ids.clone()
    wrong[1], twice[1] = torch.tensor([0, 5]), torch.tensor([3, 3])
    for place, value, error, message in (
        (0, x[:, :39], RuntimeError, r"w13 has shape .* packed matrices of \[48, 39\]"),
        (5, layer.w2, RuntimeError, r"w2 has shape .* packed matrices of \[40, 24\]"),
        (4, layer.w2_bias, RuntimeError, r"the bias of w13 has shape \[5, 40\]"),
        (8, "relu", RuntimeError, "activation is 'relu'"),
        (2, ids.long(), RuntimeError, "ids int32 of 3 rows"),
        (2, wrong, IndexError, r"ids\[1\] names expert 5 of 5"),
        (2, twice, ValueError, r"ids\[1\] names expert 3 twice"),
    ):
        with pytest.raises(error, match=message):
            OPS.moe(*arguments[:place], value, *arguments[place + 1 :])
