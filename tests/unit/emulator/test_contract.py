"""PyTorch's contract of the ops: schemas, shape functions, capture; and the bodies' agreement."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.kernel_set import KernelSet, load_kernels
from rbln_backend.layers.attention_ops import NAMESPACE
from tests.unit.emulator.cases import DTYPES, Attention

OPS, ATTENTION = torch.ops.rbln_emulator, torch.ops.rbln_emulated_ops


def calls(dtype: torch.dtype) -> list[tuple[str, tuple[object, ...]]]:
    x, residual, weight = torch.randn(6, 64), torch.randn(6, 64), torch.randn(33, 64)
    scale, cache = torch.randn(64).to(dtype), torch.randn(9, 16).to(dtype)
    x, residual, weight = (t.to(dtype) for t in (x, residual, weight))
    packed = fallback.pack_linear_weight(weight)
    blocks = (
        torch.randint(0, 2**31 - 1, (3, 16, 16), dtype=torch.int32),
        (torch.rand(3, 2, 16) / 64).half(),
        None,
    )
    matrices = torch.randn(2, 33, 32).to(dtype)
    heads = torch.stack([fallback.pack_linear_weight(matrix) for matrix in matrices]), 33
    return [
        ("pack_linear_weight", (weight,)),
        ("linear", (x, packed, None, 33)),
        ("linear", (x.view(2, 3, 64)[:, 1:], packed, torch.randn(33).to(dtype), 33)),
        ("linear_heads", (x.view(3, 2, 64)[..., 8:40], *heads)),
        ("latent_attention", latent_arguments(dtype)),
        ("shared_attention", shared_arguments(dtype)),
        ("quantized_linear", (x, *blocks, None, 33, "blocks8")),
        ("rms_norm", (x[::2], scale, 1e-5)),
        ("fused_add_rms_norm", (x, residual, scale, 1e-5)),
        ("layer_norm", (x[::2], scale, residual[0], 1e-5)),
        *(
            ("activate", (x.T.contiguous().T, function, gated))
            for function in fallback.ACTIVATIONS
            for gated in (True, False)
        ),
        ("take_rows", (x[::2], torch.tensor([[2, 0], [1, 1]]))),
        ("sample", sample_arguments(x)),
        ("rotary_embedding", (torch.arange(6), x, residual[:, :32], cache, 16, True)),
    ]


def sample_arguments(logits: Tensor) -> tuple[object, ...]:
    """Rows with every limit, with some of them, and a greedy one."""
    top_k = torch.tensor([9, 64, 3, 1, 9, 9], dtype=torch.int32)
    top_p = torch.tensor([0.9, 0.5, 1.0, 0.9, 0.1, 0.9])
    temperature, min_p = torch.tensor([1.0, 0.7, 2, 1, 0, 1]), torch.linspace(0, 0.3, 6)
    return logits, temperature, top_k, top_p, min_p, torch.arange(-3, 3) * 2**61


def shared_arguments(dtype: torch.dtype) -> tuple[object, ...]:
    """Two requests of three tokens after two and three others, over pages of four."""
    q, cache = (torch.randn(shape).to(dtype) for shape in ((2, 2, 3, 3, 32), (7, 2, 2, 1, 4, 32)))
    starts, tables = torch.tensor([[2], [3]]), torch.tensor([[3, 0], [1, 6]])
    return q, cache, torch.tensor(0.2), starts, tables, *(None,) * 6, 4


def latent_arguments(dtype: torch.dtype) -> tuple[object, ...]:
    """Two requests of three tokens, over pages of four."""
    q, kv_c, k_pe, cache = (
        torch.randn(shape).to(dtype)
        for shape in ((6, 5, 40), (6, 24), (6, 16), (7, 1, 1, 1, 4, 40))
    )
    starts, tables = torch.tensor([[0], [5]]), torch.tensor([[3, 0], [1, 6]])
    return q, kv_c, k_pe, cache, torch.tensor(0.2), starts, tables, 2


def attention_calls(dtype: torch.dtype) -> list[tuple[str, tuple[object, ...]]]:
    run = Attention(dtype=dtype, kv_heads=2, group=4, head_size=32, block_size=16, length=40)
    start = torch.tensor([[0]], dtype=torch.int32)
    tensors = (run.q, run.k, run.v, run.cache)
    flash = (*tensors, run.scale, start, run.tables[0], run.scale, torch.randn(8), 5.0)
    one_block = (*tensors, start, run.scale, run.tables, run.scale, None)
    # The window is full: 30 of the 40 rows are real, and 14 of the 16 slots are replaced.
    lengths = (torch.tensor([[16]]), torch.tensor([[46]]), run.scale, torch.tensor([1]), run.scale)
    window = (run.q, run.k, run.v, run.cache.clone().uniform_(), *lengths)
    decode = (*window[:3], window[3].clone(), *lengths, None, torch.randn(8), 5.0)
    return [
        ("flash_causal_attention_naive_prefill", flash),
        ("flash_causal_attention_naive_decode", flash),
        ("causal_attention_naive_prefill", one_block),
        ("causal_attention_naive_decode", one_block),
        ("sliding_window_attention_naive_prefill", window),
        ("sliding_window_attention_naive_decode", decode),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.wide), torch.bfloat16]
)
def test_opcheck(dtype: torch.dtype) -> None:
    for name, arguments in calls(dtype):
        # The functions of an activation differ in a word.
        if name == "activate" and arguments[1] != "silu":
            continue
        torch.library.opcheck(getattr(OPS, name).default, arguments)
    for name, arguments in attention_calls(dtype):
        torch.library.opcheck(getattr(ATTENTION, name).default, arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_bodies_pack_where_the_weight_lies(dtype: torch.dtype) -> None:
    weight = torch.randn(32, 64).to(dtype)
    plain, native = weight.clone(), weight.clone()
    torch.library.opcheck(OPS.pack_linear_weight_.default, (weight.clone(),))
    fallback.pack_linear_weight_(plain)
    OPS.pack_linear_weight_(native)
    assert torch.equal(plain, native)
    assert not torch.equal(plain, weight)


def test_every_op_has_both_bodies() -> None:
    bodies = {f"{space}::{op}" for space, named in fallback.BODIES.items() for op in named}
    spaces = tuple(f"{space}::" for space in fallback.BODIES)
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(spaces)}
    # The SDK's op for experts has its one body in `moe.glu_op`, which another test may import.
    defined -= {f"{NAMESPACE}::custom_moe_glu"}
    assert defined == bodies
    native = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in defined if not native(name, "CPU")] == []


def tensors_of(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_bodies_agree_with_the_kernels(dtype: torch.dtype) -> None:
    spaces = (("rbln_emulator", calls(dtype)), ("rbln_emulated_ops", attention_calls(dtype)))
    step = torch.finfo(dtype).eps
    for namespace, cases in spaces:
        for name, arguments in cases:
            copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
            native = getattr(getattr(torch.ops, namespace), name)(*arguments)
            plain = fallback.BODIES[namespace][name](*copies)
            for a, b in zip(tensors_of(native), tensors_of(plain), strict=True):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, rtol=2 * step, atol=32 * 1.2e-7 + step / 8)
            for after, copy in zip(arguments, copies, strict=True):
                if isinstance(after, Tensor) and isinstance(copy, Tensor):
                    assert torch.equal(after, copy)


def test_capture_as_one_graph() -> None:
    run = Attention(dtype=torch.float32, kv_heads=2, group=2, head_size=16, block_size=16, length=8)
    weight, scale = torch.randn(64, 64), torch.randn(64)
    packed = OPS.pack_linear_weight(weight)
    rotary = torch.randn(8, 16)
    start = torch.zeros(1, 1, dtype=torch.int32)

    def layer(x: Tensor) -> Tensor:
        normed, residual = OPS.fused_add_rms_norm(x, x, scale, 1e-5)
        q = OPS.linear(normed, packed, None, 64)
        q, k = OPS.rotary_embedding(torch.arange(8), q, q[:, :32], rotary, 16, True)
        shaped = [t.view(1, 8, 2, -1, 16).permute(0, 2, 3, 1, 4) for t in (q, k, k)]
        mixed = ATTENTION.flash_causal_attention_naive_prefill(
            *shaped, run.cache, run.scale, start, run.tables[0], run.scale
        )
        merged = OPS.linear(mixed.permute(0, 3, 1, 2, 4).reshape(8, 64), packed, None, 64)
        total: Tensor = merged + residual
        return total

    x = torch.randn(8, 64)
    captured = torch.compile(layer, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(captured(x), layer(x))


def test_one_process_can_change_the_bodies(kernels: KernelSet, tmp_path: Path) -> None:
    run = Attention(
        dtype=torch.bfloat16, kv_heads=1, group=1, head_size=32, block_size=16, length=9
    )
    native = run.prefill(0, 9)
    try:
        plain = load_kernels(tmp_path, "aten")
        assert (plain.name, plain.isa, plain.library) == ("aten", "aten", None)
        torch.testing.assert_close(run.prefill(0, 9), native, rtol=0.02, atol=0.01)
        assert load_kernels(tmp_path, "aten") == plain
    finally:
        again = load_kernels(tmp_path, "native")
    assert again is kernels
    assert again.name == "native"
    assert torch.equal(run.prefill(0, 9), native)
