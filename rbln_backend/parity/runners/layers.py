"""Taps on a model's decoder layers, which record the residual stream after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rbln_backend.errors import ConfigError

_USUAL_NAMES = ("layers", "h", "blocks", "block")


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of the decoder, by name, in order.

    They are the outermost list of modules with a usual name, else the longest list. Raises
    ``ConfigError`` for a model without one.
    """
    lists = [(name, part) for name, part in model.named_modules() if _is_list(part)]
    usual = [(name, part) for name, part in lists if name.rpartition(".")[2] in _USUAL_NAMES]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers to compare")
    if usual:
        name, chosen = min(usual, key=lambda item: item[0].count("."))
    else:
        name, chosen = max(lists, key=lambda item: len(list(item[1].children())))
    return [(f"{name}.{index}", layer) for index, layer in chosen.named_children()]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 0


def state_of(output: Any) -> Tensor:
    """Return the hidden states ``[..., hidden size]`` of a layer's output.

    vLLM's layers return the last block's output and the residual, which are added here. Other
    layers return a tensor, or a tuple that begins with it.
    """
    if isinstance(output, Tensor):
        return output
    first: Tensor = output[0]
    second = output[1] if len(output) > 1 else None
    if isinstance(second, Tensor) and second.shape == first.shape:
        return first + second
    return first


@contextmanager
def tapped(model: nn.Module, take: Callable[[Tensor], None]) -> Iterator[list[str]]:
    """Call ``take`` with every layer's state [T, H], in order; yields the layers' names."""
    layers = decoder_layers(model)
    hooks = [
        layer.register_forward_hook(lambda _module, _args, output: take(state_of(output)))
        for _, layer in layers
    ]
    try:
        yield [name for name, _ in layers]
    finally:
        for hook in hooks:
            hook.remove()
