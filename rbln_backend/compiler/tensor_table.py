"""Names for every tensor a graph may read or write, and the tensors behind the names.

A captured graph's inputs are recognised by identity, a stored program's by name. Names:
``param:<path>`` (a parameter or buffer of the model), ``scale:<layer>`` (an attention layer's
softmax scale), ``kv:<layer>`` (its KV cache), ``input:<name>`` (a step's buffer, per graph) and
``packed:<path>`` (a weight in the kernels' layout, made once on first use).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from rbln_backend.errors import CompileError

PACKED = "packed:"
PARAM = "param:"
INPUT = "input:"
KV = "kv:"


class TensorTable:
    """Binds names to tensors; packs weights lazily and can then release the originals."""

    def __init__(self, pack: Callable[[Tensor], Tensor]) -> None:
        self._pack = pack
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Register ``tensor``; a second name for the same tensor is an alias of the first."""
        self._tensors[name] = tensor
        self._names.setdefault(id(tensor), name)

    def add_model(self, model: nn.Module) -> None:
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self.add(f"{PARAM}{path}", parameter)
        for path, buffer in model.named_buffers(remove_duplicate=False):
            self.add(f"{PARAM}{path}", buffer)

    def name_of(self, tensor: Tensor, inputs: Mapping[str, Tensor]) -> str:
        """The name of a captured graph's input; raises ``CompileError`` for a stranger."""
        for input_name, candidate in inputs.items():
            if candidate is tensor:
                return f"{INPUT}{input_name}"
        name = self._names.get(id(tensor))
        if name is None:
            raise CompileError(
                f"the graph reads a tensor of shape {tuple(tensor.shape)} that is neither a weight,"
                " a KV cache nor a step input; it cannot be bound in another process"
            )
        return name

    def resolve(self, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """The tensor behind a stored name; raises ``CompileError`` when there is none."""
        if name.startswith(INPUT):
            found = inputs.get(name.removeprefix(INPUT))
        elif name.startswith(PACKED):
            found = self._packed(name)
        else:
            found = self._tensors.get(name)
        if found is None:
            raise CompileError(f"the program binds {name!r}, which this model does not have")
        return found

    def resolve_all(self, names: Iterable[str], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors behind a program's placeholders, in order; raises ``CompileError``."""
        return [self.resolve(name, inputs) for name in names]

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ``CompileError`` for the first name that no tensor of this model answers to."""
        for name in names:
            if name.startswith(INPUT):
                continue
            known = PARAM + name.removeprefix(PACKED) if name.startswith(PACKED) else name
            if known not in self._tensors:
                raise CompileError(f"the program binds {name!r}, which this model does not have")

    def _packed(self, name: str) -> Tensor | None:
        if name not in self._tensors:
            original = self._tensors.get(PARAM + name.removeprefix(PACKED))
            if original is None:
                return None
            self._tensors[name] = self._pack(original.data)
        return self._tensors[name]

    def release_packed_originals(self, still_used: set[str]) -> int:
        """Free the plain copy of each packed weight that no loaded program reads.

        The parameter keeps its shape over one shared element, so that a later capture still sees
        it. Returns the bytes freed.
        """
        freed = 0
        used_storages = {
            self._tensors[name].untyped_storage().data_ptr()
            for name in still_used
            if name in self._tensors
        }
        for name in [name for name in self._tensors if name.startswith(PACKED)]:
            original = self._tensors[PARAM + name.removeprefix(PACKED)]
            storage = original.untyped_storage()
            if storage.data_ptr() in used_storages or 0 in original.stride():
                continue
            freed += storage.nbytes()
            original.data = torch.empty(1, dtype=original.dtype).expand(original.shape)
        return freed
