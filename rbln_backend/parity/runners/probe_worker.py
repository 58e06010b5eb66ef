"""An RBLN worker whose graphs also return what every decoder layer leaves in the residual stream.

The model is captured, lowered and run by the same compiler as in serving; only these outputs are
added. So a fault of a kernel, of the lowering or of the weights shows at the layer that has it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.core import Phase
from rbln_backend.parity.runners.layers import tapped
from rbln_backend.worker.graphs.functions import GraphFunction, graph_function
from rbln_backend.worker.step.graph_set import StepGraph
from rbln_backend.worker.worker import RblnWorker


class ProbeWorker(RblnWorker):
    """Adds ``start_probe`` and ``take_probe`` to the methods that ``collective_rpc`` finds."""

    def start_probe(self) -> None:
        """Exchange the graphs for tapped ones; raises ``CompileError``. One request at a time."""
        assert self._build is not None
        self._taps = _Taps(self.get_model())
        self._build.observe(self._taps)

    def take_probe(self) -> tuple[list[str], list[Any]]:
        """Names of the layers and, for each, float32 states [rows, hidden size] since the start."""
        return self._taps.names, self._taps.states()


class _Taps:
    """Observer for ``EngineBuild.observe``; ``rows[i]`` are layer i's states, step by step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._traced: list[Tensor] = []
        # Hooked for as long as this lives: a capture cannot follow a hook being installed.
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
            # The capture must not see a list that the function leaves changed.
            states.clear()
            return (*outputs, *taken)

        return with_states, names

    def wrap(self, step: StepGraph) -> CompiledGraph:
        return _TappedGraph(step, self)

    def states(self) -> list[Any]:
        return [torch.cat(rows).float().numpy() for rows in self.rows]


class _TappedGraph:
    """Runs a tapped graph and hands its caller the outputs that it knows."""

    def __init__(self, step: StepGraph, taps: _Taps) -> None:
        self.spec = step.spec
        self._step = step
        self._taps = taps

    def run(self) -> tuple[Tensor, ...]:
        """As the graph's ``run``: its outputs [...], without the states."""
        outputs = self._step.graph.run()
        count = len(self._taps.rows)
        for rows, state in zip(self._taps.rows, outputs[-count:], strict=True):
            rows.append(state.reshape(-1, state.shape[-1])[: self._num_real_rows()].clone())
        return outputs[:-count]

    def prepare(self) -> None:
        """The first run may be slow here."""

    def _num_real_rows(self) -> int:
        """A decode step has one request, in the first row; a chunk ends at its last real token."""
        if not self.spec.phase.takes_chunk:
            return 1
        return int(self._step.inputs.token_indices[0]) + 1
