"""The names of an engine's tensors in its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from rbln_backend.attention.encoder import EncoderAttentionImpl
from rbln_backend.compiler.tensor_table import ADAPTERS, KV, TensorTable
from rbln_backend.emulator.packing import pack, pack_consuming
from rbln_backend.kv_cache.tensors import KvCaches

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters


def named_tensors(
    model: nn.Module,
    attention_layers: Mapping[str, Any],
    kv_caches: KvCaches,
    adapters: Adapters | None,
) -> TensorTable:
    """Return the table of all tensors that graphs read beside the inputs of a step."""
    table = TensorTable(pack, pack_consuming)
    table.add_model(model)
    for name, layer in attention_layers.items():
        if isinstance(layer.impl, EncoderAttentionImpl):
            continue
        table.add(f"scale:{name}", layer.impl.scale_tensor)
        if layer.impl.alibi_slopes is not None:
            table.add(f"alibi:{name}", layer.impl.alibi_slopes)
    for name, cache in kv_caches.tensors.items():
        table.add(f"{KV}{name}", cache)
    if adapters is not None:
        for name, stack in adapters.tensors().items():
            table.add(f"{ADAPTERS}{name}", stack)
    return table
