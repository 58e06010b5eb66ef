"""Schemas of the RBLN attention ops, shared by both devices.

Semantics (documented for the RBLN stack): with ``start`` the sum of a request's row of
``seq_idx``, the new K and V of L query tokens are written at logical positions start..start+L-1
through the block table, and query row j attends to positions 0..start+j. Padded rows carry
``seq_idx`` 0 and the null block 0. The compiler of a real device matches these ops by name; the
emulator registers CPU bodies for them.

Two namespaces have the same ops: ``rbln_custom_ops``, and ``rbln_triton_ops`` for
``RBLN_USE_CUSTOM_KERNEL``, whose KV cache keeps K and V outermost and which takes no sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMESPACE = "rbln_custom_ops"
CUSTOM_KERNEL_NAMESPACE = "rbln_triton_ops"
_FLASH = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor scale, Tensor seq_idx, "
    "Tensor block_tables, Tensor slot_mapping{sinks}) -> Tensor"
)
_ONE_BLOCK = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor seq_idx, Tensor scale, "
    "Tensor block_tables, Tensor dummy{sinks}) -> Tensor"
)
_SINKS = ", Tensor? sinks=None"
SCHEMAS = {
    "flash_causal_attention_naive_prefill": _FLASH,
    "flash_causal_attention_naive_decode": _FLASH,
    "causal_attention_naive_prefill": _ONE_BLOCK,
    "causal_attention_naive_decode": _ONE_BLOCK,
}


def _fake(q: Tensor, *_: object) -> Tensor:
    """Shape [B, Hkv, G, L, D], laid out as [B, L, Hkv, G, D] so that merging heads is a view."""
    batch, kv_heads, group, length, head_size = q.shape
    return q.new_empty(batch, length, kv_heads, group, head_size).permute(0, 2, 3, 1, 4)


def _define(namespace: str, sinks: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema.format(sinks=sinks))
        torch.library.register_fake(f"{namespace}::{name}", _fake, lib=library)
    return library


def _forward_to_plain_op(library: torch.library.Library, name: str) -> None:
    """The emulated custom kernel is the plain one over the same cache with its axes swapped."""

    def run(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, *rest: Tensor) -> Tensor:
        plain = getattr(torch.ops.rbln_custom_ops, name)
        result: Tensor = plain(q, k, v, kv_cache.transpose(0, 1), *rest)
        return result

    library.impl(name, run, "CPU")


LIBRARY = _define(NAMESPACE, _SINKS)
CUSTOM_KERNEL_LIBRARY = _define(CUSTOM_KERNEL_NAMESPACE, "")
for _name in SCHEMAS:
    _forward_to_plain_op(CUSTOM_KERNEL_LIBRARY, _name)


class CausalAttention:
    """The documented op of one namespace for a phase and a block layout."""

    def __init__(self, *, use_custom_kernel: bool) -> None:
        self._ops = torch.ops.rbln_triton_ops if use_custom_kernel else torch.ops.rbln_custom_ops

    def __call__(
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
    ) -> Tensor:
        """q [B, Hkv, G, L, D]; k, v [B, Hkv, 1, L, D]; scale 0-dim float32; see the module.

        ``one_block``: a block holds a whole request. The ops' last argument stands where a slot
        mapping would be and is never read; the scale is passed, as the documented callers do.
        """
        phase = "prefill" if is_prefill else "decode"
        result: Tensor
        if one_block:
            naive = getattr(self._ops, f"causal_attention_naive_{phase}")
            result = naive(q, k, v, kv_cache, seq_idx, scale, block_tables, scale)
        else:
            flash = getattr(self._ops, f"flash_causal_attention_naive_{phase}")
            result = flash(q, k, v, kv_cache, scale, seq_idx, block_tables, scale)
        return result
