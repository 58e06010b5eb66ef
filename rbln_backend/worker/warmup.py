"""The warm-up: compile or load the graphs, pack the weights, run new graphs once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbln_backend.collectives import Group, union_of_ranks
from rbln_backend.core import GraphSpec
from rbln_backend.devices.port import CompiledGraph
from rbln_backend.graphs.program import Program
from rbln_backend.limits import LORA_UNPROVEN
from rbln_backend.lora.slots import INPUT_NAME, NO_ADAPTER, LayerImage
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.reports.progress import ProgressWriter
from rbln_backend.worker.device_sampler import DeviceSampler, sampler_specs
from rbln_backend.worker.graph_factory import GraphFactory, GraphListener, GraphRequest, Result
from rbln_backend.worker.graph_functions import INTERMEDIATE
from rbln_backend.worker.graph_set import ADAPTER_PRODUCT
from rbln_backend.worker.inputs import StepInputs
from rbln_backend.worker.metrics import timed_phase

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters


class WarmUp(GraphListener):
    """Reports each graph on the terminal, in the progress file and in the metrics."""

    def __init__(
        self,
        progress: ProgressWriter,
        board: MetricsBoard,
        ranks: Group | None = None,
        draws: DeviceSampler | None = None,
    ) -> None:
        """``ranks``: those that must run the same graphs, None for a single rank.

        ``draws``: the sampler whose graphs are compiled after the model's.
        """
        self._progress = progress
        self._board = board
        self._ranks, self._draws = ranks, draws
        self._fresh: Set[str] = frozenset()
        self._results: dict[GraphSpec, Result] = {}

    def compile_all(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> list[CompiledGraph]:
        """Return every graph of the plan, in its order; raises ``CompileError``."""
        graphs: list[CompiledGraph] = []

        def compile_here() -> Set[str]:
            graphs.extend(self._compile(requests, factory))
            return {str(spec) for spec, how in self._results.items() if how == "compiled"}

        self._fresh = union_of_ranks(self._ranks, compile_here)
        if self._draws is not None:
            self._draws.compile(graphs, factory, self)
        return graphs

    def _compile(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> list[CompiledGraph]:
        with timed_phase(self._board, "compile"):
            self._plan(requests, factory)
            if factory.compiles_when_loading:
                return self._load_all(requests, factory)
            programs = factory.obtain_all(requests, self)
            self._progress.phase("compile", "packing weights")
            factory.pack_weights(programs.values())
            return [factory.bind(request, programs[request.spec]) for request in requests]

    def _load_all(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> list[CompiledGraph]:
        """Make the graphs with a compiler that compiles when it loads a program."""
        specs = [request.spec for request in requests]
        self._progress.phase("compile", "capturing")
        programs = factory.obtain_all(requests, GraphListener())
        restored = factory.restore_binaries(specs)
        self._progress.phase("compile")
        graphs = []
        for request in requests:
            self.graph_started(request.spec)
            started = time.perf_counter()
            graphs.append(factory.bind(request, programs[request.spec]))
            result: Result = "loaded" if restored else "compiled"
            self.graph_done(request.spec, result, time.perf_counter() - started)
        if not restored:
            factory.save_binaries(specs)
        return graphs

    def obtain_all(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> dict[GraphSpec, Program]:
        """Return the program of every graph, loaded or captured; raises ``CompileError``."""
        self._plan(requests, factory)
        return factory.obtain_all(requests, self)

    def _plan(self, requests: Sequence[GraphRequest], factory: GraphFactory) -> None:
        self._progress.phase("compile")
        specs = [request.spec for request in requests]
        if self._draws is not None:
            specs += sampler_specs(specs)
        self._progress.plan([str(spec) for spec in specs], workers=factory.capture_workers)

    @property
    def results(self) -> dict[str, Result]:
        return {str(spec): result for spec, result in self._results.items()}

    def run_all(self, graphs: Sequence[CompiledGraph]) -> None:
        """Run graphs over padding, which touches pages and starts threads.

        Newly compiled graphs and the smallest of each phase run. The others, loaded by every rank,
        only ``prepare``: long chunks of a large model would take seconds here.
        """
        self._progress.phase("warmup")
        warm = set()
        with timed_phase(self._board, "warmup"):
            for graph in graphs:
                if str(graph.spec) in self._fresh or graph.spec.phase not in warm:
                    graph.run()
                else:
                    graph.prepare()
                warm.add(graph.spec.phase)

    def graph_started(self, spec: GraphSpec) -> None:
        self._progress.graph_started(str(spec))

    def graph_done(self, spec: GraphSpec, result: Result, seconds: float) -> None:
        self._results[spec] = result
        labels = {"kind": spec.phase_name, "result": result}
        self._board.histogram("rbln_compile_seconds", **labels).observe(seconds)
        counts = Counter((s.phase_name, r) for s, r in self._results.items())
        self._board.gauge("rbln_graphs", **labels).set(counts[spec.phase_name, result])
        self._progress.graph_done(str(spec), result, seconds)


# The test of adapter slots at a start on an NPU: graphs must compute what lies in a slot now.
#
# A compiler that takes slots for weights may keep a private copy of them. Every adapter would then
# have the answers of an empty slot, and no error would tell.


Outputs = Sequence[Tensor]
Images = dict[str, LayerImage]
"""By layer."""

# Any tokens but 0, whose embedding may be zero; each is tried.
_TOKENS = (1, 7)
# Of the size of outputs: rounding differs from run to run by less, known values by more.
_DIFFERENCE = 0.02


class SlotProof:
    """Writes zeros, known values and zeros again into slots, and runs every graph over each.

    One small graph is the product of the first layer's slots alone, which the host computes, too.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._row_input, self._layers = adapters.row_input, adapters.layers
        stack = next(iter(self._layers.stacks.values()))
        self.inputs = {
            "hidden": torch.zeros(ADAPTER_PRODUCT.bucket, 1, stack.inputs, dtype=stack.a.dtype),
            INPUT_NAME: self._row_input.allocate(ADAPTER_PRODUCT.bucket),
        }
        """Of the small graph."""

    @torch.inference_mode()
    def run(
        self, graphs: Mapping[GraphSpec, CompiledGraph], inputs: Mapping[GraphSpec, StepInputs]
    ) -> None:
        """Raise ``UnsupportedModelError`` with the reason if LoRA cannot be served.

        ``inputs``: of the graphs of steps. The slots are empty before and after.
        """
        last = self._layers.lora_slots - 1
        slots = sorted({0, last})
        # Random values of the full rank for every layer.
        known: dict[int, Images] = {}
        for slot in slots:
            generator = torch.Generator().manual_seed(slot)
            stacks = self._layers.stacks.items()
            known[slot] = {name: stack.known_image(generator) for name, stack in stacks}
        expected = self._fill_product(known)
        empty, filled, again = (
            self._outputs(graphs, inputs, last, {slot: images.get(slot, {}) for slot in slots})
            for images in ({}, known, {})
        )
        for spec in empty:
            if not _differ(filled[spec], empty[spec]):
                raise LORA_UNPROVEN.refusal(
                    f"graph {spec}: known values in a slot did not change its answer, because the "
                    "SDK took a private copy of the slots"
                )
            if _differ(again[spec], empty[spec]):
                raise LORA_UNPROVEN.refusal(f"graph {spec}: a slot that was emptied still answers")
        if _differ(filled[ADAPTER_PRODUCT], [expected]):
            raise LORA_UNPROVEN.refusal(
                f"graph {ADAPTER_PRODUCT}: its product with known values is not the host's"
            )

    def _fill_product(self, known: Mapping[int, Images]) -> Tensor:
        """Fill the inputs of the small graph; return what it must give, [rows, 1, outputs]."""
        hidden, mask = self.inputs["hidden"], self.inputs[INPUT_NAME]
        hidden.copy_(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)))
        slots = [NO_ADAPTER, *known]
        self._row_input.fill(mask, [slots[n % len(slots)] for n in range(len(hidden))])
        name, stack = next(iter(self._layers.stacks.items()))
        by_slot = {slot: images[name] for slot, images in known.items()}
        return stack.on_host(self._layers.lora_slots, by_slot).product(hidden, mask)

    def _outputs(
        self,
        graphs: Mapping[GraphSpec, CompiledGraph],
        inputs: Mapping[GraphSpec, StepInputs],
        slot: int,
        images: Mapping[int, Images],
    ) -> dict[GraphSpec, Outputs]:
        """Write ``images`` by slot; return the outputs of each graph, with ``slot`` in all rows."""
        for number, image in images.items():
            self._layers.write(number, image)
        outputs_by_graph: dict[GraphSpec, Outputs] = {
            ADAPTER_PRODUCT: _copied(graphs[ADAPTER_PRODUCT].run())
        }
        for spec, step_inputs in inputs.items():
            outputs = []
            for token in _TOKENS:
                _fill(step_inputs, token, slot)
                outputs += _copied(graphs[spec].run())
            outputs_by_graph[spec] = outputs
            step_inputs.fill_idle()
        return outputs_by_graph


def _fill(inputs: StepInputs, token: int, slot: int) -> None:
    """Fill rows of padding that are computed like others."""
    inputs.fill_idle()
    inputs.token_ids[...] = token
    inputs.fill_mask([inputs.spec.bucket] * len(inputs.tokens_mask))
    inputs.fill_adapters([slot] * inputs.spec.batch_size)
    for name, tensor in inputs.tensors.items():
        if name.startswith(INTERMEDIATE):
            tensor.copy_(torch.linspace(-1, 1, tensor.shape[-1]).expand(tensor.shape))


def _copied(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [output.cpu().float() for output in outputs if output.is_floating_point()]


def _differ(some: Outputs, others: Outputs) -> bool:
    return any(
        bool((one - other).abs().mean() > _DIFFERENCE * other.abs().mean())
        for one, other in zip(some, others, strict=True)
    )
