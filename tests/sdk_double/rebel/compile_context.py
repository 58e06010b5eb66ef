"""``CompileContext``: graphs that share weights and static tensors."""

from __future__ import annotations

from rebel import log
from rebel.device import KvMemory, storage_id
from rebel.rules import require
from torch import Tensor

# Storage, offset and shape.
_Place = tuple[int, int, tuple[int, ...]]


class CompileContext:
    """Names of static tensors and of weights; graphs compiled with it address the same memory."""

    def __init__(self, use_weight_sharing: bool = False, use_global_ctx: bool = False) -> None:
        self.use_weight_sharing = use_weight_sharing
        self.use_global_ctx = use_global_ctx
        self.kv = KvMemory()
        # By place of the weight, then by name of a KV cache that its graphs read, "" for none.
        self._names: dict[_Place, dict[str, str]] = {}
        # Kept, so that the identity of each storage stays its own.
        self._weights: dict[_Place, Tensor] = {}
        # By name of the weight, then by name of a KV cache that its graphs read.
        self._places: dict[str, dict[str, _Place]] = {}
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

    def name_weight(self, name: str, weight: Tensor, caches: frozenset[str]) -> None:
        """Note that a graph over the static tensors ``caches`` calls ``weight`` by ``name``.

        Two models may use a name for weights of their own, as vllm_rbln's model and its EAGLE
        layer do (both are ``self.model`` in ``model_wrapper``), and two names for one weight, as
        its model and an MTP layer do for the LM head; each has KV caches of its own.
        """
        place = _place(weight)
        self._weights.setdefault(place, weight)
        names = self._names.setdefault(place, {})
        earlier = [names[cache] for cache in caches or names if cache in names]
        require(
            "weights",
            not earlier or (name in earlier and (not caches or set(earlier) == {name})),
            f"{name} was {', '.join(sorted(set(earlier)))} in another graph",
        )
        names |= dict.fromkeys(caches or {""}, name)
        known = self._places.setdefault(name, {})
        others = [other for cache in caches if (other := known.setdefault(cache, place)) != place]
        require(
            "weights",
            not others,
            f"{name} is {list(weight.shape)} here and was "
            f"{[list(shape) for _, _, shape in others]} over the same caches",
        )


def _place(weight: Tensor) -> _Place:
    return storage_id(weight), weight.storage_offset(), tuple(weight.shape)
