"""A compiled graph on its device."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from rebel import log
from rebel.compile_context import CompileContext
from rebel.core.held import HeldOutput, catch_up, hold
from rebel.core.inputs import Input, attributes, check_aliases
from rebel.device import (
    MEMORY,
    NPUS,
    RUNTIME_BYTES,
    alias_of_device_tensor,
    is_device_tensor,
    storage_id,
)
from rebel.rules import is_on
from rebel.settings import SETTINGS
from torch import Tensor, fx

# NaN in every float format, -1 as a number.
_GARBAGE = 0xFF

_numbers = itertools.count()
# Weights on the device by storage: graphs that share one upload it once. The host's tensor is
# kept, so that its storage's identity stays its own.
_uploaded: dict[int, tuple[Tensor, Tensor]] = {}


def upload(weight: Tensor) -> Tensor:
    if storage_id(weight) not in _uploaded:
        whole = _whole(weight)
        if not is_device_tensor(weight):
            MEMORY.take("weights", whole.numel())
        copy = whole.clone() if is_on("weights_fixed") else whole
        _uploaded[storage_id(weight)] = (weight.detach(), copy)
    original, copy = _uploaded[storage_id(weight)]
    if is_device_tensor(weight) and not torch.equal(_whole(original), copy):
        copy.fill_(_GARBAGE)
    typed = copy.view(weight.dtype)
    return typed.as_strided(weight.size(), weight.stride(), weight.storage_offset())


def _whole(weight: Tensor) -> Tensor:
    if is_device_tensor(weight):
        size = weight.untyped_storage().nbytes() // weight.element_size()
        return alias_of_device_tensor(weight.as_strided((size,), (1,), 0)).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage())


class Runtime:
    """Runs one graph; called with the tensors that the graph was compiled with, or their like."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Input],
        context: CompileContext | None,
        options: dict[str, Any],
    ) -> None:
        self.number = next(_numbers)
        self._dummy = "compile_only" in options.get("mode", ())
        if self._dummy and is_on("runtime"):
            devices = []
        elif is_on("runtime"):
            devices = NPUS.open(options.get("num_devices", 1))
        else:
            devices = [0]
        self._module, self._inputs, self._context = module, inputs, context
        self._reuse_outputs = bool(options.get("use_static_output"))
        self._outputs: list[Any] = []
        self._runs = 0
        self._packed: dict[str, Tensor] = {}
        if devices:
            self._load()
        log.write("runtime", number=self.number, devices=devices, dummy=self._dummy)

    def _load(self) -> None:
        if any(given.kind == "static" for given in self._inputs):
            MEMORY.take(f"runtime {self.number}", RUNTIME_BYTES)
            weakref.finalize(self, MEMORY.give_back, f"runtime {self.number}").atexit = False
        for name, weight in attributes(self._module):
            *path, last = name.split(".")
            owner = self._module.get_submodule(".".join(path))
            owner._parameters.pop(last, None)
            owner._buffers.pop(last, None)
            setattr(owner, last, upload(weight))
        for given in self._inputs:
            if given.is_fixed or given.kind == "static":
                self._on_device(given, given.value)
        if "operands" in SETTINGS.broken:
            operands = _operands(self._module)
            packed = [g for g in self._inputs if g.kind == "device" and g.name in operands]
            self._packed = {g.name: alias_of_device_tensor(g.value).clone() for g in packed}

    def _on_device(self, given: Input, value: Any) -> Any:
        if given.kind == "static":
            assert self._context is not None
            return self._context.kv.on_device(value)
        if given.is_fixed:
            return upload(value)
        if given.name in self._packed:
            return self._packed[given.name]
        if "hidden_states" in SETTINGS.broken and "hidden_states" in given.name:
            return torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, Tensor) and is_device_tensor(value):
            return alias_of_device_tensor(value)
        return value.detach() if isinstance(value, Tensor) else value

    def __call__(self, *values: Any) -> list[Any]:
        """The graph's outputs, in order; a dummy runtime's mean nothing."""
        check_aliases(self._inputs, values)
        if SETTINGS.holds_outputs and self._reuse_outputs and self._outputs:
            return self._launch(values)
        catch_up()
        with torch.no_grad():
            return self._run(values)

    def _launch(self, values: Sequence[Any]) -> list[Any]:
        """Return before anything is computed, with garbage in the outputs' memory."""
        hold(lambda: self._finish(values))
        for output in self._outputs:
            if isinstance(output, Tensor):
                memory = alias_of_device_tensor(output) if _on_npu(output) else output
                memory.view(torch.uint8).fill_(_GARBAGE)
        log.write("launch", number=self.number)
        return [HeldOutput.over(x) if isinstance(x, Tensor) else x for x in self._outputs]

    @torch.inference_mode()
    def _finish(self, values: Sequence[Any]) -> None:
        self._run(values)

    def _run(self, values: Sequence[Any]) -> list[Any]:
        on_device = [
            self._on_device(given, value) for given, value in zip(self._inputs, values, strict=True)
        ]
        outputs = self._module(*on_device)
        if self._dummy and is_on("runtime"):
            outputs = [torch.zeros_like(x) if isinstance(x, Tensor) else x for x in outputs]
        self._runs += 1
        log.write("run", number=self.number, runs=self._runs)
        return self._hand_out(outputs, values)

    def _hand_out(self, outputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Outputs where the inputs are; with ``use_static_output`` in the same memory each time."""
        device = next((x.device for x in values if _on_npu(x)), torch.device("cpu"))
        if not self._outputs or not self._reuse_outputs:
            self._outputs = [
                torch.empty_like(x, device=device) if isinstance(x, Tensor) else x for x in outputs
            ]
        for mine, found in zip(self._outputs, outputs, strict=True):
            if isinstance(found, Tensor):
                (alias_of_device_tensor(mine) if _on_npu(mine) else mine).copy_(found)
        return list(self._outputs)

    def _copy_kv_cache(self, src_block: int, dst_block: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` of a block of every KV cache of this graph."""
        caches = [given for given in self._inputs if given.kind == "static"]
        catch_up()
        log.write("copy_kv", src=src_block, dst=dst_block, tokens=num_tokens, caches=len(caches))
        if not caches:
            raise RuntimeError(f"runtime {self.number} has no KV cache")
        if "kv_copy" in SETTINGS.broken or self._dummy:
            return
        for given in caches:
            cache = self._on_device(given, given.value)
            cache[dst_block, ..., :num_tokens, :] = cache[src_block, ..., :num_tokens, :]

    def reset_adaptive_buffers(self) -> None:
        """Forget what was learnt of sizes; here nothing is."""
        log.write("reset_adaptive_buffers", number=self.number)


def _operands(module: fx.GraphModule) -> set[str]:
    """The names of what linear layers and products multiply by."""
    names = [(getattr(node.target, "__name__", ""), node) for node in module.graph.nodes]
    return {node.args[1].name for name, node in names if name in ("linear", "matmul")}


def _on_npu(value: Any) -> bool:
    return isinstance(value, Tensor) and is_device_tensor(value)
