"""Hidden states of the layers that a draft model reads, carried over pipeline stages.

Some of vLLM's classes hand them to the next stage. Others compute those of their own stage and drop
them; some number the layers of each stage from 0. There ``LayerStates`` collects them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from rbln_backend.vllm_compat.surface import EagleModelMixin, IntermediateTensors, get_pp_group

_COUNTS_IN_STAGE = ("MiniMaxM2Model",)
"""vLLM's classes that number the layers of each stage from 0."""


class CarriedStates(NamedTuple):
    """Names of the hidden states that a stage has for the next one, in the order of the layers."""

    received: tuple[str, ...] = ()
    """Of the stages before."""
    computed: tuple[str, ...] = ()
    """Of this stage."""


def carried_states(served: Any) -> CarriedStates:
    """Return the hidden states that this stage of ``served`` receives and computes.

    State n is what layer n reads. The stage that computes it has layer n - 1; the first one has
    state 0.
    """
    inner: Any = getattr(served, "model", None)
    layers = getattr(inner, "aux_hidden_state_layers", ())
    if not layers:
        return CarriedStates()
    names = tuple(f"{inner.AUX_HIDDEN_STATE_KEY}{place}" for place in range(len(layers)))
    first, end = _places(inner)
    return CarriedStates(names[:first], names[first:end])


def _places(inner: Any) -> tuple[int, int]:
    """Return the first place of this stage's states in those of all stages, and the end."""
    layers = inner.aux_hidden_state_layers
    first = 0 if get_pp_group().is_first_rank else bisect_right(layers, inner.start_layer)
    return first, bisect_right(layers, inner.end_layer)


class LayerStates:
    """Collects the hidden states of a stage, and hands them over with its result."""

    def __init__(self, inner: EagleModelMixin) -> None:
        """``inner``: vLLM's module of the layers, which passes each state to a method of its own.

        It must know the layers already.
        """
        first, end = _places(inner)
        before = inner.start_layer if type(inner).__name__ in _COUNTS_IN_STAGE else 0
        self._wanted = [layer - before for layer in inner.aux_hidden_state_layers[first:end]]
        self._found: list[Tensor] = []
        inner._maybe_add_hidden_state = self._add  # type: ignore[method-assign]

    def _add(
        self,
        aux_hidden_states: list[Tensor],
        layer_idx: int,
        hidden_states: Tensor,
        residual: Tensor | None,
    ) -> list[Tensor]:
        """As vLLM's method, tensors [rows, H]; the list stays empty."""
        if layer_idx in self._wanted:
            self._found.append(hidden_states if residual is None else hidden_states + residual)
        return aux_hidden_states

    def added_to(
        self, result: Any, carried: CarriedStates, received: Mapping[str, Tensor], *, is_last: bool
    ) -> Any:
        """Return a stage's ``result`` with its states, in the last one after those ``received``.

        Hidden states and each of their layers' are [rows, H].
        """
        found = dict(zip(carried.computed, self._found, strict=True))
        self._found.clear()
        if is_last:
            return result, [*(received[name] for name in carried.received), *found.values()]
        return IntermediateTensors({**result.tensors, **found})
