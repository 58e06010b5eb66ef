"""The SDK's attention ops, called as its vendor's vllm-rbln 0.12 calls them.

The SDK registers them when it is imported; nothing here defines one. Every argument is passed, by
position: no document shows the schemas' defaults. None of this has run on an NPU.

``seq_idx`` and the causal ops are as in ``attention.ops``. *Windows that are shifted* are that
module's sliding-window ops. *Windows that are appended to* (``sliding_window_attention_v1``, which
the vendor uses on RBLN-CR13) lie in the blocks of a page table like any context: row j attends to
the last ``window`` positions up to its own, and blocks that no row reaches any more may be 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbln_backend.graphs.operators import LATER, NAMESPACE, check_ops, offered


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
            *(q, k, v, kv_cache, seq_idx, scale, block_tables),
            *(window, is_causal, mask, self._sinks),
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
        op = getattr(getattr(torch.ops, NAMESPACE), name)
        found: Tensor = op(*arguments, **self._later[name])
        return found
