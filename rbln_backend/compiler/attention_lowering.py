"""Each attention layer of a captured graph as one call of the emulator's ``self_attention``.

Between a layer's two linears vLLM splits, normalises, rotates and views q, k and v, and views the
result back: twenty-odd calls, of which a small model's step mostly consists.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from rbln_backend.compiler.examples import (
    add_method,
    example,
    is_method,
    op_name,
    shape_arguments,
    viewed,
)

# [B, L, H, G, D] in memory as the ops see it, and back.
_TO_OP, _FROM_OP = (0, 2, 3, 1, 4), (0, 3, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads in rows [T, columns] of ``rows`` from ``column`` on, to be normalised by ``norm``."""

    rows: fx.Node
    column: int = 0
    norm: fx.Node | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class _Rotation:
    positions: fx.Node | None = None
    cos_sin_cache: fx.Node | None = None
    is_neox: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of an attention op by their names."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    kv_cache: fx.Node
    scale: fx.Node
    starts: fx.Node
    ends: fx.Node | None
    block_tables: fx.Node
    sinks: fx.Node | None
    soft_cap: float | None
    alibi_slopes: fx.Node | None
    k_scale: fx.Node | None
    v_scale: fx.Node | None
    chunk: int | None
    window: int | None
    query_counts: fx.Node | None


def fuse_attention(graph: fx.Graph) -> None:
    """Replace the attention ops whose heads lie in rows of tokens; leave the others alone."""
    for node in list(graph.nodes):
        call = _attention_call(node)
        if call is not None:
            _fuse(graph, node, call)


def _attention_call(node: fx.Node) -> _Call | None:
    namespace, _, name = op_name(node).partition("::")
    if namespace != "rbln_emulated_ops" or "attention_naive" not in name:
        return None
    packet = getattr(torch.ops.rbln_emulated_ops, name)
    names = [argument.name for argument in packet.default._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    is_window = "cache_seq_len" in given
    return _Call(
        given["q"],
        given["k"],
        given["v"],
        given["kv_cache"],
        given["scale"],
        given["cache_seq_len" if is_window else "seq_idx"],
        given["cache_offset"] if is_window else None,
        given["block_tables"],
        given.get("sinks"),
        given.get("logits_soft_cap"),
        given.get("alibi_slopes"),
        given.get("k_scale"),
        given.get("v_scale"),
        given.get("attention_chunk"),
        given.get("attention_window"),
        given.get("query_counts"),
    )


def _fuse(graph: fx.Graph, node: fx.Node, call: _Call) -> None:
    rows = [_token_rows(x) for x in (call.q, call.k, call.v)]
    value, values = example(call.q), example(call.v)
    if value is None or values is None or None in rows or values.shape[-1] != value.shape[-1]:
        return
    batch, kv_heads, group, length, head_size = value.shape
    q, k, v = (x for x in rows if x is not None)
    q, k, rotation = _unrotated(q, k, head_size)
    q, k = _unnormed(q, k, head_size)
    q, k, v = (_unsplit(x) for x in (q, k, v))
    with graph.inserting_before(node):
        fused = graph.call_function(
            torch.ops.rbln_emulator.self_attention.default,
            (
                *(q.rows, q.column, k.rows, k.column, v.rows, v.column),
                *(q.norm, k.norm, q.eps),
                *(rotation.positions, rotation.cos_sin_cache, rotation.is_neox),
                *(call.kv_cache, call.scale, call.starts, call.ends, call.block_tables),
                *(call.sinks, call.soft_cap, call.alibi_slopes, call.k_scale, call.v_scale),
                *(call.chunk, call.window),
                *(group, batch, call.query_counts),
            ),
        )
        width = kv_heads * group * head_size
        fused.meta["example_value"] = value.new_empty(batch * length, width)
        shape = shape_arguments((batch, length, kv_heads, group, head_size))
        seen = add_method(graph, "permute", add_method(graph, "view", fused, *shape), *_TO_OP)
    node.replace_all_uses_with(seen)
    graph.erase_node(node)


def _token_rows(heads: fx.Node) -> _Heads | None:
    """The [T, H * D] tensor that ``heads`` [B, H, G, L, D] shows, or None where there is none."""
    if not is_method(heads, "permute") or heads.args[1:] not in (_TO_OP, (_TO_OP,)):
        return None
    source = heads.args[0]
    return _rows_behind(source) if isinstance(source, fx.Node) else None


def _rows_behind(node: fx.Node) -> _Heads | None:
    for shown in viewed(node):
        value = example(shown)
        if value is not None and value.dim() == 2 and value.stride(1) == 1:
            return _Heads(shown)
    return None


def _unrotated(q: _Heads, k: _Heads, head_size: int) -> tuple[_Heads, _Heads, _Rotation]:
    """Return both tensors as they were before the rotary kernel."""
    rotary = _part_of(q.rows, 0)
    kept = q, k, _Rotation()
    if rotary is None or rotary is not _part_of(k.rows, 1):
        return kept
    if op_name(rotary) != "rbln_emulator::rotary_embedding" or rotary.args[4] != head_size:
        return kept
    positions, turned_q, turned_k, cache, _, is_neox = rotary.args
    before = [_rows_behind(x) for x in (turned_q, turned_k) if isinstance(x, fx.Node)]
    if len(before) != 2 or before[0] is None or before[1] is None:
        return kept
    assert isinstance(positions, fx.Node)
    assert isinstance(cache, fx.Node)
    return before[0], before[1], _Rotation(positions, cache, bool(is_neox))


def _part_of(node: fx.Node, index: int) -> fx.Node | None:
    """The node whose result's element ``index`` this is."""
    if node.target is operator.getitem and node.args[1] == index:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def _unnormed(q: _Heads, k: _Heads, head_size: int) -> tuple[_Heads, _Heads]:
    """Return both tensors before their per-head norms, if both have one with the same epsilon."""
    before = _before_norm(q, head_size), _before_norm(k, head_size)
    if before[0] is None or before[1] is None or before[0].eps != before[1].eps:
        return q, k
    return before[0], before[1]


def _before_norm(heads: _Heads, head_size: int) -> _Heads | None:
    for norm in viewed(heads.rows):
        if op_name(norm) != "rbln_emulator::rms_norm":
            continue
        x, weight, eps = norm.args
        value = example(norm)
        if value is None or value.shape[-1] != head_size or not isinstance(x, fx.Node):
            return None
        rows = _rows_behind(x)
        return rows and replace(rows, norm=weight, eps=float(eps))  # type: ignore[arg-type]
    return None


def _unsplit(heads: _Heads) -> _Heads:
    """The rows that ``split`` or ``chunk`` cut ``heads`` from."""
    node, value = heads.rows, example(heads.rows)
    if node.target is not operator.getitem or value is None:
        return heads
    cut = node.args[0]
    if not is_method(cut, "split", "chunk") and getattr(cut, "target", None) not in _SPLITS:
        return heads
    assert isinstance(cut, fx.Node)
    whole = cut.args[0]
    rows = example(whole)
    if not isinstance(whole, fx.Node) or rows is None or rows.dim() != 2:
        return heads
    if rows.stride() != value.stride() and rows.shape[0] > 1:
        return heads
    column = int(value.storage_offset() - rows.storage_offset())
    return replace(heads, rows=whole, column=column)


_SPLITS: tuple[Callable[..., tuple[Tensor, ...]], ...] = (torch.split, torch.chunk)
