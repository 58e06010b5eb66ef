"""The linear kernel: values, strides, packing, and bits that do not depend on the batch."""

import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.ir.ops.layernorm import fused_add_rms_norm as vllm_fused_add_rms_norm
from vllm.ir.ops.layernorm import rms_norm as vllm_rms_norm
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from rbln_backend.devices.emulated.build import _FLAGS, _SOURCE_DIR, LEVELS, Target
from rbln_backend.devices.emulated.kernel_set import active_isa, coded, set_threads
from rbln_backend.devices.emulated.memory import choose_memory
from rbln_backend.devices.emulated.packing import (
    can_pack,
    fits_in_place,
    pack_consuming,
    pack_reference,
    unpack,
)
from rbln_backend.devices.layers import RblnLMHead, install_layers
from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts
from tests.unit.emulator.test_memory import resident_bytes

OPS = torch.ops.rbln_emulator


def make(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(rows, depth).to(dtype),
        (torch.randn(columns, depth) * depth**-0.5).to(dtype),
        torch.randn(columns).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (1, 1, 1),
        (1, 33, 7),
        (2, 16, 64),
        (5, 100, 65),
        (7, 15, 300),
        (8, 48, 513),
        (14, 17, 31),
        (40, 130, 257),
        (200, 20, 129),
    ],
)
def test_equals_float64(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight, bias = make(rows, columns, depth, dtype)
    packed = OPS.pack_linear_weight(weight)
    product = x.double() @ weight.double().T
    assert_near(OPS.linear(x, packed, None, columns), product)
    assert_near(OPS.linear(x, packed, bias, columns), product + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_has_the_bits_it_has_alone(dtype: torch.dtype) -> None:
    x, weight, bias = make(70, 50, 530, dtype)
    packed = OPS.pack_linear_weight(weight)
    alone = torch.cat([OPS.linear(row, packed, bias, 50) for row in x.split(1)])
    for rows in range(1, 71):
        assert torch.equal(OPS.linear(x[:rows], packed, bias, 50), alone[:rows]), rows
    big = torch.cat([x] * 6)
    assert torch.equal(OPS.linear(big, packed, bias, 50), torch.cat([alone] * 6))


@pytest.mark.parametrize("rows", [1, 3, 8, 70])
def test_threads_do_not_change_a_bit(rows: int) -> None:
    x, weight, bias = make(rows, 600, 700, torch.bfloat16)
    packed = OPS.pack_linear_weight(weight)
    one, two = for_thread_counts(lambda: OPS.linear(x, packed, bias, 600))
    assert torch.equal(one, two)


def test_a_nan_row_stays_alone() -> None:
    x, weight, _ = make(9, 40, 70, torch.float32)
    packed = OPS.pack_linear_weight(weight)
    clean = OPS.linear(x, packed, None, 40)
    x[4] = float("nan")
    dirty = OPS.linear(x, packed, None, 40)
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_strided_and_higher_dimensional_activations() -> None:
    x, weight, _ = make(12, 20, 33, torch.bfloat16)
    packed = OPS.pack_linear_weight(weight)
    plain = OPS.linear(x, packed, None, 20)
    padded = torch.full((12, 50), float("nan"), dtype=torch.bfloat16)
    padded[:, 10:43] = x
    assert torch.equal(OPS.linear(padded[:, 10:43], packed, None, 20), plain)
    assert torch.equal(OPS.linear(x.T.contiguous().T, packed, None, 20), plain)
    cube = OPS.linear(x.view(3, 4, 33).transpose(0, 1), packed, None, 20)
    assert torch.equal(cube, plain.view(3, 4, 20).transpose(0, 1))
    assert OPS.linear(x[:0], packed, None, 20).shape == (0, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (16, 8), (33, 7), (40, 66), (160, 1026)])
def test_packing_matches_its_reference(columns: int, depth: int, dtype: torch.dtype) -> None:
    weight = torch.randn(columns, depth).to(dtype)
    packed = OPS.pack_linear_weight(weight)
    assert torch.equal(packed, pack_reference(weight))
    assert torch.equal(unpack(packed, columns, depth), weight)
    wide = torch.randn(columns, 2 * depth).to(dtype)
    assert torch.equal(
        OPS.pack_linear_weight(wide[:, :depth]), pack_reference(wide[:, :depth].contiguous())
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(16, 2), (48, 34), (160, 1026), (20, 6), (16, 7)])
def test_packing_where_the_weight_lies(
    columns: int, depth: int, dtype: torch.dtype, threads: int
) -> None:
    weight = torch.randn(columns, depth).to(dtype)
    expected, address, fits = pack_reference(weight), weight.data_ptr(), fits_in_place(weight)
    set_threads(threads)
    packed = pack_consuming(weight)
    assert torch.equal(packed, expected)
    assert (packed.data_ptr() == address) == fits
    assert fits == (columns % 16 == 0 and (depth % 2 == 0 or dtype != torch.bfloat16))
    if not fits:
        with pytest.raises(RuntimeError, match="needs padding"):
            OPS.pack_linear_weight_(weight)
    assert can_pack(weight)
    for other in (torch.zeros(3, 5, dtype=torch.int8), torch.zeros(5), torch.zeros(0, 5)):
        assert not can_pack(other)


def normal(columns: int, depth: int) -> Tensor:
    return (torch.randn(columns, depth) * depth**-0.5).bfloat16()


def with_rare_exponents(columns: int, depth: int) -> Tensor:
    """Some are zero, some far larger or smaller than the others, also where a panel ends."""
    weight = normal(columns, depth)
    places = torch.randperm(weight.numel())[: max(4, weight.numel() // 300)]
    odd = torch.tensor([0.0, -0.0, 100.0, -3e-9, 1e-30, -(2.0**17)]).bfloat16()
    weight.view(-1)[places] = odd[torch.arange(len(places)) % len(odd)]
    weight[0, 0], weight[-1, -1], weight[min(15, columns - 1), -1] = 64.0, 0.0, -1e-12
    return weight


def code(weight: Tensor) -> Tensor:
    """``weight`` [N, K] packed and coded, which it is wherever the kernels read codes."""
    result = coded(OPS.pack_linear_weight(weight), len(weight))
    assert result.dtype == (torch.uint8 if active_isa().startswith("avx512") else torch.bfloat16)
    return result


@pytest.mark.parametrize("make_weight", [normal, with_rare_exponents])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(1, 48, 264), (5, 100, 64), (8, 130, 1032), (13, 47, 512), (40, 272, 2056), (280, 160, 136)],
)
def test_coded_weights_lose_nothing(
    rows: int, columns: int, depth: int, make_weight: Callable[[int, int], Tensor]
) -> None:
    x, weight = torch.randn(rows, depth).bfloat16(), make_weight(columns, depth)
    bias, packed = torch.randn(columns).bfloat16(), code(weight)
    terms = x.double().unsqueeze(1) * weight.double()
    # What is rounded is as large as the largest term.
    scale = max(1.0, float(terms.abs().max()))
    product = OPS.linear(x, packed, bias, columns)
    assert_near(product, terms.sum(dim=2) + bias.double(), scale=scale)
    for results in for_thread_counts(lambda: OPS.linear(x, packed, bias, columns)):
        assert torch.equal(results, product)
    alone = [OPS.linear(row, packed, bias, columns) for row in x.split(1)]
    assert torch.equal(torch.cat(alone), product)


def test_a_matrix_of_zeros_is_coded() -> None:
    packed = code(torch.zeros(32, 64).bfloat16())
    assert OPS.linear(torch.randn(3, 64).bfloat16(), packed, None, 32).eq(0).all()


@pytest.mark.parametrize(
    "weight",
    [
        normal(16, 7),
        normal(16, 68),
        torch.randn(32, 64),
        torch.randn(32, 64).half(),
        torch.logspace(-20, 20, 2048).view(32, 64).bfloat16(),
        torch.full((32, 64), float("inf")).bfloat16(),
    ],
    ids=["odd depth", "rest of a step", "float32", "float16", "exponents", "infinities"],
)
def test_what_has_no_codes_stays_as_it_is(weight: Tensor) -> None:
    packed = OPS.pack_linear_weight(weight)
    assert coded(packed, len(weight)) is packed
    assert torch.equal(packed, pack_reference(weight))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_no_numbers_keep_their_place(value: float) -> None:
    weight = normal(64, 512)
    weight[17, 5] = value
    result = OPS.linear(torch.randn(3, 512).bfloat16(), code(weight), None, 64)
    assert not result[:, 17].isfinite().any()
    assert result[:, [*range(17), *range(18, 64)]].isfinite().all()


def test_codes_that_point_elsewhere_are_refused() -> None:
    x, packed = torch.ones(1, 512).bfloat16(), code(with_rare_exponents(48, 512))
    if packed.dtype != torch.uint8:
        pytest.skip("this CPU's kernels read no codes")
    behind = packed.view(-1)[packed.numel() * 3 // 4 :].view(torch.int32)
    # A place in the list, where the list ends, a depth and a column.
    for index, value in ((1, 7), (4, 10**6), (5, 512), (6, 16), (5, -1), (6, -3)):
        kept = behind[index].clone()
        behind[index] = value
        with pytest.raises(RuntimeError, match="packed is not a coded weight"):
            OPS.linear(x, packed, None, 48)
        behind[index] = kept
    OPS.linear(x, packed, None, 48)
    with pytest.raises(RuntimeError, match="packed is not a coded weight"):
        OPS.linear(x, packed[..., :3].contiguous(), None, 48)


def test_mistakes_are_named() -> None:
    x, weight, bias = make(2, 20, 33, torch.float32)
    packed = OPS.pack_linear_weight(weight)
    for arguments, message in (
        ((x[:, :32], None, 20), "32 features, the packed weight was made for 33"),
        ((x, None, 33), "out_features 33 does not fit 2 panels"),
        ((x, bias[:19], 20), "bias has 19 elements instead of 20"),
        ((x.bfloat16(), None, 20), "packed has dtype Float instead of BFloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OPS.linear(arguments[0], packed, *arguments[1:])


# ------------------------------------------------------------------------------------------ lm head
SIZES = (1 << 15, 512)
BYTES = 2 << 24


@pytest.fixture
def mapped(native_kernels: Path) -> Iterator[None]:
    install_layers()
    choose_memory(mapped=True, huge_pages=False)
    yield
    choose_memory(mapped=False, huge_pages=False)


def make_head(*, is_tied: bool, device: str = "cpu") -> tuple[Any, int]:
    """A head as a model makes it, and by how much that has made the process larger."""
    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(
        hf_text_config=SimpleNamespace(tie_word_embeddings=is_tied)
    )
    # Heads of earlier tests would make the process smaller in between.
    gc.collect()
    with set_current_vllm_config(config), torch.device(device):
        before = resident_bytes()
        head = ParallelLMHead(*SIZES, params_dtype=torch.bfloat16, disable_tp=True)
        return head, resident_bytes() - before


@pytest.mark.usefixtures("mapped")
def test_a_head_that_will_be_tied_takes_no_memory() -> None:
    head, grown = make_head(is_tied=True)
    assert type(head) is RblnLMHead
    assert (head.weight.shape, head.weight.dtype) == (SIZES, torch.bfloat16)
    assert grown < BYTES // 8
    table = VocabParallelEmbedding(*SIZES, params_dtype=torch.bfloat16, disable_tp=True)
    assert head.tie_weights(table).weight is table.weight
    # One that is filled in spite of it is a head.
    head, _ = make_head(is_tied=True)
    rows = torch.randn(SIZES).bfloat16()
    head.weight.weight_loader(head.weight, rows)
    assert torch.equal(head.weight, rows)


@pytest.mark.usefixtures("mapped")
def test_any_other_has_its_memory_at_once() -> None:
    assert make_head(is_tied=False)[1] > BYTES * 7 // 8
    assert make_head(is_tied=True, device="meta")[0].weight.is_meta


# ------------------------------------------------------------------------------------------- layers
@pytest.fixture
def vllm_config() -> Iterator[None]:
    install_layers()
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_norm(dtype: torch.dtype) -> None:
    layer = GemmaRMSNorm(48).to(dtype)
    torch.nn.init.normal_(layer.weight)
    x, residual = (torch.randn(5, 48).to(dtype) for _ in range(2))
    assert type(layer) is not GemmaRMSNorm
    assert_near(layer(x), GemmaRMSNorm.forward_native(layer, x).double())
    normed, total = layer(x, residual)
    expected, expected_total = GemmaRMSNorm.forward_native(layer, x, residual)
    assert_near(normed, expected.double())
    assert torch.equal(total, expected_total)


def rotaries(dtype: torch.dtype) -> list[RotaryEmbedding]:
    sizes = {"head_size": 32, "rotary_dim": 24, "base": 10000.0, "is_neox_style": True}
    sizes |= {"max_position_embeddings": 64, "dtype": dtype}
    scaled = LinearScalingRotaryEmbedding(**sizes, scaling_factors=4.0)
    return [scaled, YaRNScalingRotaryEmbedding(**sizes, scaling_factor=4.0)]


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_rotaries(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 63, 200])
    query, key = torch.randn(4, 96).to(dtype), torch.randn(4, 64).to(dtype)
    for layer in rotaries(dtype):
        assert type(layer).__name__.startswith("Emulated")
        actual = layer(positions, query, key)
        # Upstream's own, over the same table in double precision.
        expected = RotaryEmbedding.forward_native(
            layer.double(), positions, query.double(), key.double()
        )
        for turned, wanted in zip(actual, expected, strict=True):
            assert_near(turned, wanted)


# --------------------------------------------------------------------------------- interleaved rows
SOURCE = Path(__file__).parent / "interleaved_rows.cpp"
# The vectors of the level of bf16 products are those of AVX-512.
WIDTHS = [
    level for level in LEVELS if level.name in ("avx512", "avx2", "portable") and level.runs_here()
]


@pytest.mark.parametrize(
    "level",
    [WIDTHS[0], *(pytest.param(level, marks=pytest.mark.wide) for level in WIDTHS[1:])],
    ids=lambda level: level.name,
)
def test_every_word_is_in_its_place(level: Target, tmp_path: Path) -> None:
    program = tmp_path / "interleaved_rows"
    command = ["g++", *_FLAGS, *level.flags, "-O1", "-fsanitize=address", "-Werror"]
    command += ["-iquote", str(_SOURCE_DIR), str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------------------------------- small ops
SMALL_OPS_WIDTHS = (1, 7, 32, 100, 576, 2049)


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    bits = [x.contiguous().view(kind).long() for x in (a, b)]
    lowest = torch.iinfo(kind).min
    ordered = [torch.where(x < 0, lowest - x, x) for x in bits]
    return (ordered[0] - ordered[1]).abs()


def assert_vllm_rounding(actual: Tensor, expected: Tensor) -> None:
    # vLLM rounds to the weight's dtype before it multiplies by the weight. Where the f32 value
    # lies on a rounding edge both neighbours are right, and the product may carry that one further.
    apart = steps_apart(actual, expected)
    assert int(apart.max()) <= (4 if actual.dtype == torch.float32 else 2)
    if actual.dtype != torch.float32:
        assert float((apart > 0).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", SMALL_OPS_WIDTHS)
def test_norms_round_like_vllm(width: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(40, width).to(dtype) for _ in range(2))
    for weight in (torch.randn(width).to(dtype), torch.randn(width)):
        assert_vllm_rounding(
            OPS.rms_norm(x, weight, 1e-5), vllm_rms_norm.impls["native"].impl_fn(x, weight, 1e-5)
        )
        normed, new_residual = OPS.fused_add_rms_norm(x, residual, weight, 1e-5)
        native = vllm_fused_add_rms_norm.impls["native"].impl_fn
        expected, expected_residual = native(x, residual, weight, 1e-5)
        assert_vllm_rounding(normed, expected)
        assert torch.equal(new_residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", SMALL_OPS_WIDTHS)
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    # A mean far from zero: a variance from plain squares would be lost in it.
    x = (torch.randn(40, width) + 30).to(dtype)
    weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
    for scale, shift in ((weight, bias), (weight, None), (None, None)):
        wide = [None if t is None else t.double() for t in (scale, shift)]
        expected = functional.layer_norm(x.double(), (width,), *wide, 1e-5)
        assert_near(OPS.layer_norm(x, scale, shift, 1e-5), expected, scale=30)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_activations(function: str, dtype: torch.dtype) -> None:
    for width in SMALL_OPS_WIDTHS:
        x = (torch.randn(9, 2 * width) * 4).to(dtype)
        x[0] = torch.linspace(-120, 120, 2 * width).to(dtype)
        x[1, 0] = float("nan")
        gate, up = x.double().chunk(2, dim=-1)
        apply = FUNCTIONS[function]
        for gated, expected in ((True, apply(gate) * up), (False, apply(x.double()))):
            actual = OPS.activate(x, function, gated)
            assert torch.equal(actual.isnan(), expected.isnan())
            assert_near(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (80, 32), (6, 6), (128, 128)])
def test_rotary_embedding(head_size: int, rotary: int, neox: bool, dtype: torch.dtype) -> None:
    layer_cache = torch.randn(50, rotary).to(dtype)
    positions = torch.randint(0, 50, (11,))
    qkv = torch.randn(11, 5 * head_size).to(dtype)
    q, k, _ = qkv.split([3 * head_size, head_size, head_size], dim=-1)
    got = OPS.rotary_embedding(positions, q, k, layer_cache, head_size, neox)
    wide = RotaryEmbedding.forward_static(
        positions, q.double(), k.double(), head_size, rotary, layer_cache.double(), neox
    )
    for actual, expected in zip(got, wide, strict=True):
        assert actual.is_contiguous()
        assert expected is not None
        assert_near(actual, expected)
    as_batch = OPS.rotary_embedding(positions.int().view(1, 11), q, k, layer_cache, head_size, neox)
    assert torch.equal(as_batch[0], got[0])


def test_rotary_positions_and_head_sizes_are_checked() -> None:
    q, k, cache = torch.randn(2, 8), torch.randn(2, 8), torch.randn(10, 8)
    for position in (-1, 10):
        with pytest.raises(IndexError, match=f"position {position} is outside .* of 10"):
            OPS.rotary_embedding(torch.tensor([0, position]), q, k, cache, 8, True)
    # The number stands in stored graphs, which cannot divide by zero.
    for head_size in (0, -8):
        with pytest.raises(RuntimeError, match=f"head_size is {head_size}"):
            OPS.rotary_embedding(torch.tensor([0, 1]), q, k, cache, head_size, True)
    with pytest.raises(RuntimeError, match="function 'selu' is none of silu, gelu, "):
        OPS.activate(torch.ones(1, 2), "selu", False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_bits_in_any_batch_stride_and_thread_count(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(70, 1026).to(dtype) for _ in range(2))
    weight, cache = torch.randn(1026).to(dtype), torch.randn(70, 54).to(dtype)
    positions = torch.arange(70)

    def compute(rows: slice) -> Tensor:
        part, other = x[rows], residual[rows]
        results = [
            OPS.rms_norm(part, weight, 1e-6),
            *OPS.fused_add_rms_norm(part, other, weight, 1e-6),
            OPS.activate(part, "silu", True),
            OPS.activate(other, "gelu", False),
            OPS.layer_norm(part, weight, None, 1e-6),
            *OPS.rotary_embedding(positions[rows], part, other, cache, 54, True),
        ]
        return torch.cat(results, dim=-1)

    alone = torch.cat([compute(slice(i, i + 1)) for i in range(70)])
    for rows in (2, 5, 33, 70):
        assert torch.equal(compute(slice(rows)), alone[:rows])
    assert torch.equal(compute(slice(0, 70, 3)), alone[::3])
    x, residual, positions = x.repeat(3, 1), residual.repeat(3, 1), positions.repeat(3)
    for result in for_thread_counts(lambda: compute(slice(None))):
        assert torch.equal(result, alone.repeat(3, 1))


def test_leading_dimensions_that_do_not_collapse_are_copied() -> None:
    x = torch.randn(3, 4, 6, 10).permute(2, 0, 1, 3)
    weight = torch.randn(10)
    assert torch.equal(OPS.rms_norm(x, weight, 1e-6), OPS.rms_norm(x.contiguous(), weight, 1e-6))
    for gated in (True, False):
        same = OPS.activate(x.contiguous(), "gelu", gated)
        assert torch.equal(OPS.activate(x, "gelu", gated), same)
