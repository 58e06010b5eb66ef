"""Small calls of the double in a process of their own, each by name; see ``test_double.py``.

The argument is a list of names; the result has for each the message of what it raised, or null.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import rebel
import torch
from rebel.core import torch_compile
from torch import Tensor, fx, nn
from torch._dynamo.source import LocalSource, UnspecializedNNModuleSource
from torch.nn import functional

BLOCKS, HEADS, GROUP, BLOCK, CHUNK, SIZE = 4, 2, 2, 512, 128, 32
SCALE = torch.tensor(SIZE**-0.5)
OPS = torch.ops.rbln_custom_ops


def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, idx: Tensor, tables: Tensor) -> Tensor:
    """The causal op as vllm_rbln calls it."""
    name = "prefill" if tables.dim() == 1 else "decode"
    op = getattr(OPS, f"flash_causal_attention_naive_{name}")
    found: Tensor = op(q, k, v, kv, SCALE, idx, tables, SCALE, None, None, None, None)
    return found


def window_attend(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, idx: Tensor, tables: Tensor, window: int
) -> Tensor:
    """The op of a window in pages, which has no phases."""
    found: Tensor = OPS.sliding_window_attention_v1(
        q, k, v, kv, idx, SCALE, tables, window, True, None, None
    )
    return found


def few(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, idx: Tensor, tables: Tensor) -> Tensor:
    """The same op without the arguments after ``slot_mapping``."""
    found: Tensor = OPS.flash_causal_attention_naive_prefill(q, k, v, kv, SCALE, idx, tables, SCALE)
    return found


def tokens(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, HEADS, GROUP, length, SIZE)
    return q, *(torch.randn(batch, HEADS, 1, length, SIZE) for _ in "kv")


def padded(rows: Tensor, length: int) -> Tensor:
    """rows [..., L, D] and zeros behind them: [..., length, D]."""
    return functional.pad(rows, (0, 0, 0, length - rows.shape[-2]))


def start(position: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([[position]], dtype=dtype)


def blocks(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class Device:
    """A context with one KV cache, and graphs compiled in it."""

    def __init__(self, device: str = "meta", block: int = BLOCK, *, marked: bool = True) -> None:
        self.context = rebel.CompileContext(use_weight_sharing=True, use_global_ctx=True)
        self.kv = torch.zeros(BLOCKS, 2, HEADS, 1, block, SIZE, device=device)
        self.runtimes: list[Any] = []
        if marked:
            self.context.mark_static_address(self.kv, "layer")

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """As vllm_rbln: through Dynamo, with its options."""
        defaults = {
            "compile_context": self.context,
            "mode": ["strict"],
            "num_devices": 1,
            "_runtime_holder": self.runtimes,
        }
        compiled: Callable[..., Any] = torch.compile(
            function,
            backend=torch_compile.rbln_backend,
            dynamic=False,
            fullgraph=True,
            options={**defaults, **options},
        )
        return compiled

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, position: int, *table: int) -> Tensor:
        found: Tensor = self.compile(attend)(q, k, v, self.kv, start(position), blocks(*table))
        return found


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Return torch's attention of a prompt: q [1, H, G, L, D]; k and v [1, H, 1, L, D]."""
    length = q.shape[3]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    mask = (columns <= rows) & (columns > rows - (window or length + 1))
    k, v = (x.expand(1, HEADS, GROUP, length, SIZE) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=float(SCALE))


def project(rows_do: Callable[[Tensor], Tensor]) -> None:
    """Attend to what a linear layer makes of a chunk [1, L, H], seen as rows by ``rows_do``."""
    device, width = Device(), (GROUP + 2) * HEADS * SIZE

    def attend_to(x: Tensor, weight: Tensor, kv: Tensor, idx: Tensor, table: Tensor) -> Tensor:
        rows = rows_do(functional.linear(x, weight).view(CHUNK, width))
        by_head = rows.view(1, CHUNK, HEADS, GROUP + 2, SIZE).permute(0, 2, 3, 1, 4)
        return attend(*by_head.split([GROUP, 1, 1], dim=2), kv, idx, table)

    x, weight = torch.randn(1, CHUNK, SIZE), torch.randn(width, SIZE)
    device.compile(attend_to)(x, weight, device.kv, start(0), blocks(1, 0))


def route(choose: Callable[[Tensor], Tensor]) -> None:
    """Send 5 rows to 4 experts as ``choose`` says of the router's logits [5, 4]."""
    x, router = torch.randn(5, 8), torch.randn(4, 8)
    gate, up, down = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)

    def mix(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights = choose(functional.linear(x, router))
        found: Tensor = OPS.custom_moe_glu(
            x, gate, up, down, weights, "silu", None, None, None, None
        )
        return found

    found = Device().compile(mix)(x, router, gate, up, down)
    logits = functional.linear(x, router)
    best, ids = logits.softmax(dim=-1).topk(2, dim=-1)
    shares = torch.zeros_like(logits).scatter(1, ids, best).T
    expected = OPS.custom_moe_glu(x, gate, up, down, shares, "silu", None, None, None, None)
    assert torch.allclose(found, expected, atol=1e-5)


# ----------------------------------------------------------------------------------- what is right


def a_prompt_in_chunks_and_a_decode() -> None:
    device = Device()
    q, k, v = tokens(2 * CHUNK + 1)
    expected = plain(q, k, v)
    for at in (0, CHUNK):
        part = slice(at, at + CHUNK)
        found = device.prefill(q[..., part, :], k[..., part, :], v[..., part, :], at, 2, 3)
        assert torch.allclose(found, expected[..., part, :], atol=1e-5)
    decode = device.compile(attend)
    last = [x[..., -1:, :] for x in (q, k, v)]
    found = decode(*last, device.kv, start(2 * CHUNK), blocks(2, 3)[None])
    assert torch.allclose(found, expected[..., -1:, :], atol=1e-5)


def a_decode_of_several_tokens_across_blocks() -> None:
    """Of two requests, the longer one first; the tokens of the other stay in its first block."""
    window, drafts = 64, 4
    for op in (attend, partial(window_attend, window=window)):
        device = Device()
        lengths, tables = (BLOCK + 2, CHUNK + drafts), (blocks(3, 1), blocks(2, 0))
        requests = [tokens(length) for length in lengths]
        shown = window if op is not attend else None
        ends = []
        for (q, k, v), length, table in zip(requests, lengths, tables, strict=True):
            for at in range(0, length - drafts, CHUNK):
                # The padding of the last chunk is written over by the decode step.
                part = [padded(x[..., at : at + CHUNK, :], CHUNK) for x in (q, k, v)]
                device.compile(op)(*part, device.kv, start(at), table)
            ends.append(plain(q, k, v, shown)[..., -drafts:, :])
        last = [
            torch.cat([x[..., -drafts:, :] for x in parts]) for parts in zip(*requests, strict=True)
        ]
        starts = torch.tensor([[length - drafts] for length in lengths])
        found = device.compile(op)(*last, device.kv, starts, torch.stack(tables))
        assert torch.allclose(found, torch.cat(ends), atol=1e-5)
        shortest_first = (x.flip(0) for x in (*last, starts, torch.stack(tables)))
        q, k, v, starts, table = shortest_first
        found = device.compile(op)(q, k, v, device.kv, starts, table)
        assert not torch.allclose(found, torch.cat(ends[::-1]), atol=1e-5)


def a_copy_of_a_block() -> None:
    device = Device()
    q, k, v = tokens(2 * CHUNK)
    first, second = slice(CHUNK), slice(CHUNK, None)
    device.prefill(*(x[..., first, :] for x in (q, k, v)), 0, 1, 0)
    device.runtimes[0]._copy_kv_cache(1, 3, CHUNK)
    found = device.prefill(*(x[..., second, :] for x in (q, k, v)), CHUNK, 3, 0)
    assert torch.allclose(found, plain(q, k, v)[..., second, :], atol=1e-5)


def both_ops_of_a_window() -> None:
    window, length = 64, 200
    q, k, v = tokens(length)
    expected = plain(q, k, v, window)
    kv = torch.full((BLOCKS, 2, HEADS, 1, BLOCK, SIZE), torch.nan)
    shifted = torch.full((BLOCKS, 2, HEADS, 1, window, SIZE), torch.nan)
    for at in range(0, length, CHUNK // 2):
        part = [x[..., at : at + CHUNK // 2, :] for x in (q, k, v)]
        real = part[0].shape[3]
        rows = [padded(x, CHUNK // 2) for x in part]
        found = OPS.sliding_window_attention_v1(
            *rows, kv, start(at), SCALE, blocks(2, 1), window, True, None, None
        )
        held = min(at, window)
        other = OPS.sliding_window_attention_naive_prefill(
            *rows, shifted, start(held), start(held + real), SCALE, blocks(1), SCALE, None
        )
        for name, x in (("append", found), ("shift", other)):
            right = torch.allclose(x[..., :real, :], expected[..., at : at + real, :], atol=1e-5)
            assert right, f"{name} at {at}"


def experts_of_one_rank_of_two() -> None:
    x, gate, up = torch.randn(3, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    down, routing = torch.randn(2, 8, 6), torch.rand(4, 3)
    here = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    found = OPS.custom_moe_glu(x, gate, up, down, routing, "silu", here, None, None, None)
    expected = torch.zeros_like(x)
    for everywhere, local in ((1, 1), (3, 0)):
        inner = functional.silu(x @ gate[local].T) * (x @ up[local].T)
        expected += inner @ down[local].T * routing[everywhere][:, None]
    assert torch.allclose(found, expected, atol=1e-5)


def experts_of_one_chain() -> None:
    def choose(logits: Tensor) -> Tensor:
        by_expert = logits.transpose(0, 1)
        best, ids = torch.topk(functional.softmax(by_expert, dim=0), 2, dim=0)
        table = torch.zeros_like(by_expert)
        table.scatter_(0, ids, best)
        return table * torch.ones(1, 5)

    route(choose)


def experts_of_fp8_in_blocks() -> None:
    x, routing = torch.randn(3, 8), torch.rand(2, 3)
    stored = [torch.randn(2, *size).to(torch.float8_e4m3fn) for size in ((6, 8), (6, 8), (8, 6))]
    scales = [torch.rand(2, *size) for size in ((3, 4), (3, 4), (4, 3))]
    pairs = [part for pair in zip(stored, scales, strict=True) for part in pair]
    group = torch.tensor(2, dtype=torch.int32)
    found = OPS.custom_moe_glu_group_dequantize(
        x, *pairs, routing, group, "silu", None, None, None, None
    )
    # Blocks of 2 x 2.
    plain = [
        w.float() * torch.kron(scale, torch.ones(1, 2, 2))
        for w, scale in zip(stored, scales, strict=True)
    ]
    wanted = OPS.custom_moe_glu(x, *plain, routing, "silu", None, None, None, None)
    assert torch.allclose(found, wanted, atol=1e-5)


def a_weight_written_after_it_was_loaded() -> None:
    weight = nn.Parameter(torch.ones(3))
    graph = Device().compile(lambda x: x + weight)
    graph(torch.zeros(3))
    weight.data.fill_(5.0)
    assert graph(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0], "the device has its own copy"


def models_that_name_weights_alike() -> None:
    """Each has a KV cache of its own; both know the last two weights, one by two names."""
    device, common, head = Device(), torch.ones(2), torch.ones(2)
    other = torch.zeros_like(device.kv)
    device.context.mark_static_address(other, "drafts")
    for size, cache in ((2, device.kv), (3, other), (2, None)):
        if cache is not None:
            _load(device, torch.ones(size), cache)
        _load(device, common, cache, "embedding")
        _load(device, head, cache, "own_head" if cache is other else "head")


def outputs_in_the_same_memory() -> None:
    graph = Device().compile(lambda x: x + 1, use_static_output=True)
    first = graph(torch.zeros(3))
    second = graph(torch.ones(3))
    assert first.tolist() == [2.0] * 3
    assert first.data_ptr() == second.data_ptr()


# ------------------------------------------------------------------------------ what breaks a rule


def a_block_of_another_size() -> None:
    device = Device(block=256)
    device.prefill(*tokens(CHUNK), 0, 1, 0)


def a_chunk_that_does_not_divide_the_block() -> None:
    Device().prefill(*tokens(96), 0, 1, 0)


def a_decode_that_ends_behind_its_table() -> None:
    decode = Device()
    q, k, v = tokens(4)
    decode.compile(attend)(q, k, v, decode.kv, start(BLOCK - 3), blocks(2)[None])


def projections_that_are_seen_as_rows() -> None:
    project(lambda rows: rows.view(CHUNK, -1, SIZE))


def an_assignment_into_a_tensor() -> None:
    def assign(x: Tensor) -> Tensor:
        result = x + 1
        result[x == 0] = 5
        return result

    assert Device().compile(assign)(torch.tensor([0.0, 1.0])).tolist() == [5.0, 2.0]


def gradients_on() -> None:
    with torch.enable_grad():
        torch_compile.rbln_backend(_adder(), [torch.zeros(2)], options={})


def nodes_without_values() -> None:
    module = _adder()
    for node in module.graph.nodes:
        node.meta.clear()
    torch_compile.rbln_backend(module, [torch.zeros(2)], options={})


def an_operator_with_its_overload() -> None:
    Device().compile(lambda x: torch.ops.aten.relu.default(x) + 1)(torch.zeros(2))


def an_unknown_option() -> None:
    Device().compile(lambda x: x + 1, number_of_devices=1)(torch.zeros(2))


def a_mode_that_is_no_list() -> None:
    Device().compile(lambda x: x + 1, mode="strict")(torch.zeros(2))


def a_cache_on_the_host() -> None:
    Device(device="cpu")


def a_cache_that_is_an_input() -> None:
    device = Device(device="cpu", marked=False)
    device.prefill(*tokens(CHUNK), 0, 1, 0)


def too_few_arguments() -> None:
    device = Device()
    device.compile(few)(*tokens(CHUNK), device.kv, start(0), blocks(1, 0))


def an_index_of_32_bits() -> None:
    device = Device()
    arguments = (*tokens(CHUNK), device.kv, start(0, torch.int32), blocks(1, 0))
    device.compile(attend)(*arguments)


def two_weights_of_one_name() -> None:
    device = Device()
    for size in (2, 3):
        _load(device, torch.ones(size), device.kv)


def two_names_of_one_weight() -> None:
    device, weight = Device(), torch.ones(2)
    for name in ("weight", "bias"):
        _load(device, weight, device.kv, name)


def a_graph_that_is_called() -> None:
    Device().compile(lambda x: x + 1)(torch.zeros(2))


def a_graph_that_is_only_compiled() -> None:
    graph = Device().compile(lambda x: x + 1, mode=["strict", "compile_only"])
    assert graph(torch.zeros(2)).tolist() == [0.0, 0.0], "a dummy device computes nothing"


def a_cache_of_any_size() -> None:
    Device().prefill(*tokens(CHUNK), 0, 1, 0)


def a_weight_that_is_transposed() -> None:
    weight = torch.ones(2, 3).T
    torch_compile.rbln_backend(_adder(weight), [torch.zeros(3, 2)], options={})


def projections_that_are_computed_in_rows() -> None:
    project(lambda rows: rows.view(CHUNK, -1, SIZE) * 2)


def experts_of_a_wider_table() -> None:
    def choose(logits: Tensor) -> Tensor:
        best, ids = logits.softmax(dim=-1).topk(2, dim=-1)
        return torch.zeros_like(functional.pad(logits, (0, 1))).scatter(1, ids, best)[:, :4].t()

    route(choose)


def experts_of_compared_numbers() -> None:
    def choose(logits: Tensor) -> Tensor:
        best, ids = logits.softmax(dim=-1).topk(2, dim=-1)
        chosen = best.masked_fill(ids == 9, 0.0)
        return torch.zeros_like(logits).scatter(1, ids, chosen).transpose(0, 1)

    route(choose)


def experts_of_the_whole_softmax() -> None:
    route(lambda logits: logits.softmax(dim=-1).transpose(0, 1))


def two_inputs_in_the_same_memory() -> None:
    both = torch.zeros(4)
    graph = Device().compile(lambda x, y: x + y)
    graph(torch.zeros(3), torch.zeros(3))
    graph(both[:3], both[1:])


def an_input_of_unknown_source() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = fx.GraphModule(nn.Module(), graph)
    torch_compile.rbln_backend(module, [torch.zeros(2)], options={})


def a_weight_without_a_mark() -> None:
    _load(Device(), torch.ones(2), None, mark=False)


def a_buffer_without_a_mark() -> None:
    _load(Device(), torch.ones(2), None, mark=False, as_buffer=True)


def a_step_input_with_a_mark() -> None:
    x = torch.zeros(2)
    torch._dynamo.mark_static_address(x)
    Device().compile(lambda x: x + 1)(x)


def _load(
    device: Device,
    weight: Tensor,
    cache: Tensor | None,
    name: str = "weight",
    *,
    mark: bool = True,
    as_buffer: bool = False,
) -> None:
    """Compile a graph that adds ``weight``, and reads ``cache`` if there is one."""
    graph = fx.Graph()
    caches = [] if cache is None else [cache]
    value = weight if as_buffer else nn.Parameter(weight, requires_grad=False)
    values = [torch.zeros_like(weight), value, *caches]
    owned = UnspecializedNNModuleSource(LocalSource(name))
    given = []
    for source in (LocalSource("x"), owned, *(LocalSource("kv") for _ in caches)):
        given.append(graph.placeholder(re.sub(r"\W+", "_", source.name)))
        given[-1].meta["grapharg"] = SimpleNamespace(source=source)
    if mark:
        torch._dynamo.mark_static_address(value)
        given[1].meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    total = graph.call_function(torch.add, (given[0], given[1]))
    total.meta["example_value"] = weight
    graph.output((total, *given[2:]))
    options = {"compile_context": device.context}
    torch_compile.rbln_backend(fx.GraphModule(nn.Module(), graph), values, options=options)


def _adder(weight: Tensor | None = None) -> fx.GraphModule:
    graph, owner = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    other: Any = 1
    if weight is not None:
        owner.register_buffer("weight", weight)
        other = graph.get_attr("weight")
    total = graph.call_function(torch.add, (x, other))
    total.meta["example_value"] = torch.zeros(2)
    graph.output((total,))
    return fx.GraphModule(owner, graph)


def outcome(name: str) -> str | None:
    """Return the case's error as one line; None if it passed."""
    torch._dynamo.reset()
    case: Callable[[], None] = globals()[name]
    try:
        with torch.no_grad():
            case()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return None


if __name__ == "__main__":
    outcomes = {name: outcome(name) for name in json.loads(sys.argv[1])}
    sys.stdout.write(f"RESULT {json.dumps(outcomes)}\n")
