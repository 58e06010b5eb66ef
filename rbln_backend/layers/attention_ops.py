"""The attention ops of the emulated device: what the SDK's ops of the same names compute.

They lie in namespaces of their own, so that they never meet the SDK's; ``SdkAttention`` calls
those. q is [B, Hkv, G, L, D], k is [B, Hkv, 1, L, D], v is [B, Hkv, 1, L, Dv] and the result
[B, Hkv, G, L, Dv]; Dv is at most D, and the cache keeps values in the first Dv numbers of a row.

*Causal ops.* ``seq_idx`` [B, 1] holds each request's first query position, ``start``. The new K and
V of L query tokens are written at logical positions start..start+L-1 through the block table, and
query row j attends to positions 0..start+j. Padded rows carry ``seq_idx`` 0 and the null block 0.

*Sliding-window ops.* A request owns one block, whose slots are the window. ``cache_seq_len`` of its
tokens come before the step, and the block's first slots hold the latest of them in order; of the L
rows the first ``cache_offset - cache_seq_len`` are real. Row j attends to itself and to the
window - 1 tokens before it, in the block or new; afterwards the block holds the latest tokens
again, from slot 0 on. The other rows are padding and give zeros. What padded rows and unused slots
hold is never read. The decode op's ``attn_mask`` says again what ``cache_seq_len`` says: it is not
read. Lengths may count all tokens of the request instead of those that the block holds; the bits
are the same.

The second namespace is for ``RBLN_USE_CUSTOM_KERNEL``, whose KV cache keeps K and V outermost and
whose ops end after the documented required arguments. ``sinks`` are one more logit per query head
in the softmax's denominator. The other options are ours, not the SDK's. ``logits_soft_cap``: a
scaled score s becomes cap * tanh(s / cap), before sinks join. ``alibi_slopes`` [Hq]: a score loses
its head's slope times the distance of the key. ``attention_chunk`` c: position p sees none before
p // c * c; ``attention_window`` w: none before p + 1 - w, though the cache keeps all. ``k_scale``
and ``v_scale``, float32 scalars, come with a cache of float8_e4m3fn, whatever q, k and v are: it
keeps k / k_scale and v / v_scale, rounded to the nearest, at most 448 either way, and every token,
new ones too, sees what it keeps times the scale. ``query_counts`` [R]: q, k and v are a batch of
one, in which the rows of R requests lie one after the other, so many of each, and all that is said
above of a request (``seq_idx`` and the like [R, 1], tables [R, P]) holds for each; rows after the
last give zeros.

*The SDK's ops* are called as its vendor's vllm-rbln 0.12 calls them. The SDK registers them when it
is imported; nothing here defines one. Every argument is passed, by position: no document shows the
schemas' defaults. None of this has run on an NPU. ``seq_idx`` and the causal ops are as above.
*Windows that are shifted* are the sliding-window ops above. *Windows that are appended to*
(``sliding_window_attention_v1``, which the vendor uses on RBLN-CR13) lie in the blocks of a page
table like any context: row j attends to the last ``window`` positions up to its own, and blocks
that no row reaches any more may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.graphs.operators import LATER, check_ops, offered
from rbln_backend.graphs.operators import NAMESPACE as SDK_NAMESPACE

NAMESPACE = "rbln_emulated_ops"
CUSTOM_KERNEL_NAMESPACE = "rbln_emulated_kernels"
_QKV = "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, "
_FLASH = _QKV + "Tensor scale, Tensor seq_idx, Tensor block_tables, Tensor slot_mapping"
_ONE_BLOCK = _QKV + "Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy"
_WINDOW = (
    _QKV + "Tensor cache_seq_len, Tensor cache_offset, Tensor scale, Tensor block_tables, "
    "Tensor dummy"
)
_MASK = ", Tensor? attn_mask=None"
_OPTIONS = (
    ", Tensor? sinks=None, float? logits_soft_cap=None, Tensor? alibi_slopes=None"
    ", Tensor? k_scale=None, Tensor? v_scale=None"
)
_BOUNDS = ", int? attention_chunk=None, int? attention_window=None"
_COUNTS = ", Tensor? query_counts=None"
# Per op: the arguments of both namespaces, and what only the first takes after them.
SCHEMAS = {
    "flash_causal_attention_naive_prefill": (_FLASH, _OPTIONS + _BOUNDS + _COUNTS),
    "flash_causal_attention_naive_decode": (_FLASH, _OPTIONS + _BOUNDS + _COUNTS),
    "causal_attention_naive_prefill": (_ONE_BLOCK, _OPTIONS + _BOUNDS + _COUNTS),
    "causal_attention_naive_decode": (_ONE_BLOCK, _OPTIONS + _BOUNDS + _COUNTS),
    "sliding_window_attention_naive_prefill": (_WINDOW, _OPTIONS + _COUNTS),
    "sliding_window_attention_naive_decode": (_WINDOW, _MASK + _OPTIONS + _COUNTS),
}


def _fake(q: Tensor, _: Tensor, v: Tensor, *__: object) -> Tensor:
    """Shape [B, Hkv, G, L, Dv], laid out as [B, L, Hkv, G, Dv] so that merging heads is a view."""
    batch, kv_heads, group, length = q.shape[:4]
    return q.new_empty(batch, length, kv_heads, group, v.shape[-1]).permute(0, 2, 3, 1, 4)


def _define(namespace: str, *, with_options: bool) -> torch.library.Library:
    library = torch.library.Library(namespace, "DEF")
    for name, (required, options) in SCHEMAS.items():
        arguments = required + options if with_options else required
        library.define(f"{name}{arguments}) -> Tensor")
        torch.library.register_fake(f"{namespace}::{name}", _fake, lib=library)
    return library


def _forward_to_plain_op(library: torch.library.Library, name: str) -> None:
    """The emulated custom kernel is the plain one over the same cache with its axes swapped."""

    def run(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, *rest: Tensor) -> Tensor:
        plain = getattr(torch.ops.rbln_emulated_ops, name)
        result: Tensor = plain(q, k, v, kv_cache.transpose(0, 1), *rest)
        return result

    library.impl(name, run, "CPU")


LIBRARY = _define(NAMESPACE, with_options=True)
CUSTOM_KERNEL_LIBRARY = _define(CUSTOM_KERNEL_NAMESPACE, with_options=False)
for _name in SCHEMAS:
    _forward_to_plain_op(CUSTOM_KERNEL_LIBRARY, _name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Options of a layer beyond causal attention, as the ops take them."""

    sinks: Tensor | None = None
    soft_cap: float | None = None
    alibi_slopes: Tensor | None = None

    def named(self) -> dict[str, Any]:
        """Those that are set, but for the sinks, by the names of the ops' arguments."""
        return _set(logits_soft_cap=self.soft_cap, alibi_slopes=self.alibi_slopes)


def _set(**options: object) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


class EmulatedAttention:
    """The calls of one layer, with no argument that the layer has no need of."""

    def __init__(self, options: AttentionOptions, *, use_custom_kernel: bool) -> None:
        """Raises UnsupportedModelError where the namespace has no such option."""
        self._namespace = CUSTOM_KERNEL_NAMESPACE if use_custom_kernel else NAMESPACE
        self._sinks = options.sinks
        self._named = options.named()
        named = ["sinks"] * (options.sinks is not None) + list(self._named)
        if use_custom_kernel and named:
            raise UnsupportedModelError(
                f"the custom attention kernels take no {named[0]}; unset RBLN_USE_CUSTOM_KERNEL"
            )

    def causal(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        scale: Tensor,
        seq_idx: Tensor,
        block_tables: Tensor,
        is_prefill: bool,
        one_block: bool,
        chunk: int | None = None,
        window: int | None = None,
        layer: object = None,
        **others: Tensor,
    ) -> Tensor:
        """q, k, v as in the module; scale 0-dim float32; seq_idx [B, 1].

        ``others``: ``k_scale`` and ``v_scale`` where the cache is of e4m3, ``query_counts`` where
        a batch of one holds several requests.

        ``chunk``, ``window``: what the layer sees of its context, where that is not all of it.
        ``one_block``: a block holds a whole request. The ops' last argument stands where a slot
        mapping would be and is never read; the scale is passed, as the documented callers do.
        """
        phase = "prefill" if is_prefill else "decode"
        bounds = others | _set(attention_chunk=chunk, attention_window=window)
        if one_block:
            arguments = (q, k, v, kv_cache, seq_idx, scale, block_tables, scale)
            return self._call(f"causal_attention_naive_{phase}", arguments, bounds)
        arguments = (q, k, v, kv_cache, scale, seq_idx, block_tables, scale)
        return self._call(f"flash_causal_attention_naive_{phase}", arguments, bounds)

    def shared(
        self,
        *,
        q: Tensor,
        kv_cache: Tensor,
        scale: Tensor,
        seq_idx: Tensor,
        block_tables: Tensor,
        chunk: int | None = None,
        window: int | None = None,
        **others: Tensor,
    ) -> Tensor:
        """As ``causal``, q [B, Hkv, G, L, D], over a cache that another layer has just written."""
        bounds = others | _set(attention_chunk=chunk, attention_window=window)
        options = self._named | _set(sinks=self._sinks) | bounds
        op = torch.ops.rbln_emulator.shared_attention
        result: Tensor = op(q, kv_cache, scale, seq_idx, block_tables, **options)
        return result

    def shifted_window(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        scale: Tensor,
        cache_seq_len: Tensor,
        cache_offset: Tensor,
        block_tables: Tensor,
        is_prefill: bool,
        **others: Tensor,
    ) -> Tensor:
        """kv_cache [N, 2, Hkv, 1, window, D]; cache_seq_len, cache_offset [B, 1]; see the module.

        ``block_tables`` is [1] in prefill and [B, 1] in decode: each request's own block. Where
        the slot mapping would be, the scale is passed, as the documented callers do.
        """
        phase = "prefill" if is_prefill else "decode"
        lengths = (cache_seq_len, cache_offset)
        arguments = (q, k, v, kv_cache, *lengths, scale, block_tables, scale)
        return self._call(f"sliding_window_attention_naive_{phase}", arguments, others)

    def _call(
        self, name: str, arguments: tuple[Tensor, ...], bounds: dict[str, Any] | None = None
    ) -> Tensor:
        positional: list[Tensor | None] = [*arguments]
        if self._sinks is not None:
            # By position, as the documented callers do: None stands for the mask before them.
            positional += [None] if _MASK in SCHEMAS[name][1] else []
            positional.append(self._sinks)
        op = getattr(getattr(torch.ops, self._namespace), name)
        result: Tensor = op(*positional, **self._named, **(bounds or {}))
        return result


class SdkAttention:
    """The calls of one layer."""

    def __init__(
        self,
        *,
        window: int | None,
        appends: bool,
        longest_first: bool,
        sinks: Tensor | None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """``sinks`` [Hq], and [Hq, 1] once they are loaded; ``appends``: the NPU keeps windows in
        pages; ``longest_first``: so are the rows of decode steps; ``cache_dtype``: the floats of 8
        bits in a cache of bytes, None for a cache of the model's dtype.

        Raises ``UnsupportedModelError`` where the installed SDK lacks an op.
        """
        self._sinks = sinks
        # Looked up here: what follows is traced.
        self._later = {name: offered(name, is_prompt_sorted=longest_first) for name in LATER}
        self._cache_dtype = cache_dtype
        kinds = ["flash_causal_attention_naive"]
        if window is not None and appends:
            check_ops("sliding_window_attention_v1")
        elif window is not None:
            kinds.append("sliding_window_attention_naive")
        check_ops(*(f"{kind}_{phase}" for kind in kinds for phase in ("prefill", "decode")))

    def prepare_weights(self) -> None:
        """Give sinks the axes that the documented callers give them, outside of the graph."""
        if self._sinks is not None:
            self._sinks.data = self._sinks.data.view(-1, 1)

    def causal(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        scale: Tensor,
        seq_idx: Tensor,
        block_tables: Tensor,
        is_prefill: bool,
        one_block: bool,
        chunk: int | None,
        window: int | None,
        layer: Any,
    ) -> Tensor:
        """q [B, Hkv, G, L, D]; k, v [B, Hkv, 1, L, D]; seq_idx [B, 1]; scale 0-dim float32.

        ``one_block``: a block holds a whole request. ``chunk`` and ``window`` are refused when
        caches are planned. ``layer`` has the scales of quantised caches, which are refused
        where ``one_block``; the softmax's stands where nothing is read.
        """
        assert chunk is None
        assert window is None
        if one_block and self._sinks is None:
            one = (q, k, v, kv_cache, seq_idx, scale, block_tables, scale, None)
            return self._call("causal_attention_naive", is_prefill, *one)
        many = (q, k, v, kv_cache, scale, seq_idx, block_tables, scale, self._sinks)
        scales = (layer._k_scale, layer._v_scale, self._cache_dtype)
        return self._call("flash_causal_attention_naive", is_prefill, *many, *scales)

    def appended_window(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        scale: Tensor,
        seq_idx: Tensor,
        block_tables: Tensor,
        window: int,
    ) -> Tensor:
        """As ``causal``, q [B, Hkv, G, L, D], over the window; the SDK derives the mask."""
        is_causal, mask = True, None
        return self._op(
            "sliding_window_attention_v1",
            q,
            k,
            v,
            kv_cache,
            seq_idx,
            scale,
            block_tables,
            window,
            is_causal,
            mask,
            self._sinks,
        )

    def shifted_window(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        scale: Tensor,
        cache_seq_len: Tensor,
        cache_offset: Tensor,
        block_tables: Tensor,
        is_prefill: bool,
    ) -> Tensor:
        """cache_seq_len, cache_offset [B, 1]; block_tables [1] or [B, 1]."""
        arguments = (q, k, v, kv_cache, cache_seq_len, cache_offset, scale, block_tables, scale)
        mask = () if is_prefill else (None,)
        return self._call(
            "sliding_window_attention_naive", is_prefill, *arguments, *mask, self._sinks
        )

    def _call(self, kind: str, is_prefill: bool, *arguments: object) -> Tensor:
        return self._op(f"{kind}_{'prefill' if is_prefill else 'decode'}", *arguments)

    def _op(self, name: str, *arguments: object) -> Tensor:
        op = getattr(getattr(torch.ops, SDK_NAMESPACE), name)
        found: Tensor = op(*arguments, **self._later[name])
        return found
