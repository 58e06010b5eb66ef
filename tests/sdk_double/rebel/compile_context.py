"""``CompileContext``: graphs that share weights and static tensors."""

from __future__ import annotations

from rebel import log
from rebel.device import KvMemory, storage_id
from rebel.rules import require
from torch import Tensor


class CompileContext:
    """Names of static tensors and of weights; graphs compiled with it address the same memory."""

    def __init__(self, use_weight_sharing: bool = False, use_global_ctx: bool = False) -> None:
        self.use_weight_sharing = use_weight_sharing
        self.use_global_ctx = use_global_ctx
        self.kv = KvMemory()
        self._weights: dict[str, Tensor] = {}
        log.write("context", use_weight_sharing=use_weight_sharing, use_global_ctx=use_global_ctx)

    def mark_static_address(self, tensor: Tensor, name: str) -> None:
        """Give ``tensor`` an address of the device, for every graph of this context."""
        log.write(
            "mark_static_address",
            name=name,
            device=tensor.device.type,
            dtype=str(tensor.dtype),
            shape=list(tensor.shape),
        )
        require("static", tensor.device.type == "meta", f"{name} is on {tensor.device.type}")
        self.kv.add(tensor, name)

    def name_weight(self, name: str, weight: Tensor) -> None:
        """Note that a graph calls ``weight`` by ``name``; a name means one weight."""
        known = self._weights.setdefault(name, weight)
        same = (storage_id(known), known.storage_offset(), known.shape) == (
            storage_id(weight),
            weight.storage_offset(),
            weight.shape,
        )
        require(
            "weights",
            same,
            f"{name} is {list(weight.shape)} here and was {list(known.shape)} of other storage",
        )
