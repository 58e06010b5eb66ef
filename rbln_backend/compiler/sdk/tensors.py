"""Where the tensors of graphs lie for the SDK: in host memory, or all of them on the NPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from rbln_backend.compiler.tensor_table import INPUT


class BoundTensors(Protocol):
    """The arguments of one runtime."""

    arguments: list[Tensor]

    def before_run(self) -> None:
        """Bring what a step filled to where the runtime reads it."""
        ...

    def after_run(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs [...], in host memory or on the NPU."""
        ...


class HostTensors:
    """The runtime copies what it needs; caches are known to it by their names."""

    def __init__(self, bindings: Sequence[str], tensors: Sequence[Tensor]) -> None:  # noqa: ARG002
        self.arguments = list(tensors)

    def before_run(self) -> None:
        """Nothing: the runtime reads the step's own buffers."""

    def after_run(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs [...] unchanged."""
        return tuple(outputs)


class Moved:
    """Weights that have moved to the NPU, each once for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}

    def twin(self, tensor: Tensor) -> Tensor:
        """Return the NPU copy of ``tensor`` [...]; for a weight the host keeps its shape alone."""
        if id(tensor) not in self._twins:
            twin = tensor.detach().to(self.device)
            if isinstance(tensor, nn.Parameter):
                # The SDK tells weights by it. Buffers stay: vLLM shares rotary tables with the
                # next model of this process.
                twin = nn.Parameter(twin, requires_grad=False)
                _keep_shape(tensor)
            self._twins[id(tensor)] = (tensor, twin)
        return self._twins[id(tensor)][1]

    def resident(self, tensor: Tensor) -> Tensor:
        """Return the NPU copy of ``tensor`` [...], no weight, of which the host keeps its shape."""
        twin = self.twin(tensor)
        _keep_shape(tensor)
        return twin


def _keep_shape(tensor: Tensor) -> None:
    tensor.data = tensor.data.new_empty(()).expand(tensor.shape)


class NpuTensors:
    """Weights move for good, when the first graph reads them; a step's buffers have twins."""

    def __init__(self, bindings: Sequence[str], tensors: Sequence[Tensor], moved: Moved) -> None:
        self._filled: list[tuple[Tensor, Tensor]] = []
        self._bindings = list(bindings)
        self.arguments: list[Tensor] = []
        for binding, tensor in zip(bindings, tensors, strict=True):
            self.arguments.append(self._place(binding, tensor, moved))

    def _place(self, binding: str, tensor: Tensor, moved: Moved) -> Tensor:
        if tensor.device.type == moved.device.type:
            return tensor
        if not binding.startswith(INPUT):
            return moved.twin(tensor)
        twin = tensor.to(moved.device)
        self._filled.append((twin, tensor))
        return twin

    def put(self, name: str, tensor: Tensor) -> None:
        """Read ``tensor`` [...] of the NPU's memory as the input ``name``; it is not copied."""
        place = self._bindings.index(INPUT + name)
        twin, self.arguments[place] = self.arguments[place], tensor
        self._filled = [pair for pair in self._filled if pair[0] is not twin]

    def before_run(self) -> None:
        """Copy the step's buffers."""
        for twin, tensor in self._filled:
            twin.copy_(tensor)

    def after_run(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs [...] on the NPU: most of them are never read."""
        return tuple(outputs)
