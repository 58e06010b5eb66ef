"""RBLN worker whose graphs also return the residual stream after every decoder layer.

The model is captured, lowered and run by the same compiler as in serving; only these outputs are
added. An error of a kernel, the lowering or the weights therefore shows at its layer. A module of
its own: the reference's process must not import our worker.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.core import Phase, UsefulRows
from rbln_backend.devices.port import CompiledGraph
from rbln_backend.parity.layers import tapped
from rbln_backend.worker.graph_functions import GraphFunction, graph_function
from rbln_backend.worker.graph_set import StepGraph
from rbln_backend.worker.worker import RblnWorker


class ProbeWorker(RblnWorker):
    """Worker with ``start_probe`` and ``take_probe`` for ``collective_rpc``."""

    def start_probe(self) -> None:
        """Replace the graphs by tapped ones, for one request at a time; raises ``CompileError``."""
        assert self._build is not None
        self._taps = _Taps(self.get_model())
        self._build.observe(self._taps.function, self._taps.wrap)

    def take_probe(self) -> tuple[list[str], list[Any]]:
        """Return the layers' names, and for each float32 states [rows, hidden size]."""
        return self._taps.names, self._taps.states()


class _Taps:
    """Observer for ``EngineBuild.observe``; ``rows[i]`` are layer i's states, step by step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._traced: list[Tensor] = []
        # Hooks stay installed: a capture cannot follow their installation.
        self._hooks = ExitStack()
        self.names = self._hooks.enter_context(tapped(model, self._traced.append))
        self.rows: list[list[Tensor]] = [[] for _ in self.names]

    def function(self, phase: Phase) -> tuple[GraphFunction, tuple[str, ...]]:
        plain, names = graph_function(phase, self._model)
        states = self._traced

        def with_states(*args: Tensor) -> tuple[Tensor, ...]:
            """Run the model: outputs [...] and the states of its layers."""
            outputs = plain(*args)
            taken = tuple(states)
            # The captured function must not leave a changed list.
            states.clear()
            return (*outputs, *taken)

        return with_states, names

    def wrap(self, step: StepGraph) -> CompiledGraph:
        return _TappedGraph(step, self)

    def states(self) -> list[Any]:
        return [torch.cat(rows).float().numpy() for rows in self.rows]


class _TappedGraph:
    """Tapped graph that returns the outputs of the plain one."""

    def __init__(self, step: StepGraph, taps: _Taps) -> None:
        self.spec = step.spec
        self._step = step
        self._taps = taps

    def run(self, useful: UsefulRows | None = None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Run the graph and return its outputs [...] without the states."""
        outputs = tuple(output.cpu() for output in self._step.graph.run())
        count, real = len(self._taps.rows), 1
        if self.spec.phase.takes_chunk:
            real = int(self._step.inputs.token_indices[0]) + 1
        for rows, state in zip(self._taps.rows, outputs[-count:], strict=True):
            rows.append(state.reshape(-1, state.shape[-1])[:real].clone())
        return outputs[:-count]

    def prepare(self) -> None:
        """Do nothing: a slow first run is acceptable."""
