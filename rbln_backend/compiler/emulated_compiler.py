"""The emulated device behind the compiler port: captured programs run on this host's CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, fx

from rbln_backend.compiler.capabilities import EMULATED
from rbln_backend.compiler.constants import fold_constants
from rbln_backend.compiler.lowering import lower_graph
from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.compiler.programs.call_list import CallList
from rbln_backend.compiler.programs.program import Program
from rbln_backend.compiler.programs.shapes import check_shapes
from rbln_backend.compiler.recorder import Recorder, Step
from rbln_backend.core import GraphSpec, UsefulRows
from rbln_backend.emulator.kernel_set import native_library
from rbln_backend.emulator.kv_memory import HostKvMemory
from rbln_backend.emulator.replay import Recording, StartRecording
from rbln_backend.parallel.channel import open_channel, use_channels
from rbln_backend.parallel.collectives import Group

logger = logging.getLogger(__name__)


class EmulatedGraph:
    """The program over fixed tensors: a list of calls at first, then what its first run did."""

    def __init__(
        self,
        spec: GraphSpec,
        graph: fx.Graph,
        tensors: Sequence[Tensor],
        record: StartRecording | None,
    ) -> None:
        self.spec = spec
        self._calls: Callable[..., tuple[Tensor, ...]] = CallList(graph)
        self._tensors = tuple(tensors)
        self._record = record
        library = native_library()
        self._set_useful_rows = None if library is None else library.rbln_emulator_set_useful_rows
        self._steps: list[Step] = []
        self._logits_steps: list[Step] = []
        """The steps without those that hidden states alone need."""
        self._cache_steps: list[Step] = []
        """The steps up to the last write of a KV cache; empty if that is not known."""
        self._outputs: tuple[Tensor, ...] = ()
        self._is_native = False
        """All steps are calls of the kernels."""

    def run(self, useful: UsefulRows | None = None) -> tuple[Tensor, ...]:
        """As ``CompiledGraph.run``: outputs [...] of the program; kernels skip padding."""
        spec, set_useful = self.spec, self._set_useful_rows
        if useful is None or set_useful is None:
            return self._run(self._steps)
        set_useful(spec.bucket, useful.rows, spec.prompts, useful.ends)
        try:
            return self._run(self._steps_for(useful))
        finally:
            set_useful(0, 0, 0, 0)

    def _steps_for(self, useful: UsefulRows) -> Sequence[Step]:
        """Return the steps of what is read; other outputs keep what they hold."""
        if useful.reads_hidden:
            return self._steps
        return self._logits_steps if useful.ends else self._cache_steps or self._logits_steps

    def _run(self, steps: Sequence[Step]) -> tuple[Tensor, ...]:
        """Run ``steps``; interpret the calls where none is recorded."""
        if self._is_native:
            for step in steps:
                step()
            return self._outputs
        # Operators of PyTorch write to its tensors.
        with torch.inference_mode():
            for step in steps:
                step()
            if steps:
                return self._outputs
            if self._record is None:
                return self._calls(*self._tensors)
            return self._first_run(self._record())

    def prepare(self) -> None:
        """Record the run, computing nothing; a graph that needs values waits for its first run."""
        if self._record is None or self._steps:
            return
        try:
            self._first_run(self._record(is_rehearsal=True))
        except (RuntimeError, IndexError) as error:
            logger.debug("Graph %s is recorded by its first run: %s", self.spec, error)

    def _first_run(self, recording: Recording) -> tuple[Tensor, ...]:
        recorder = Recorder(recording)
        try:
            with recorder:
                outputs = self._calls(*self._tensors)
        finally:
            recording.end()
        if recorder.is_repeatable:
            self._steps, self._outputs = recorder.steps(), outputs
            self._logits_steps = recorder.steps_to(outputs[0])
            self._is_native = recorder.is_native
            self._cache_steps = recorder.cache_steps()
        else:
            self._record = None
        return outputs


class EmulatedCompiler:
    """Lowers programs to the emulator's kernels; nothing is built at run time."""

    name = "emulated"
    capabilities = EMULATED
    compiles_when_loading = False

    def __init__(
        self,
        kernels: Literal["native", "aten"],
        *,
        hardware: str = "",
        record: StartRecording | None = None,
        reserves_kv: bool = False,
    ) -> None:
        """With native ``kernels`` linear weights are repacked, and whatever has a kernel calls it.

        ``hardware`` is their instruction set; all of them run the same programs. ``record`` starts
        a recording of native calls; without it, every run is interpreted. ``reserves_kv`` takes the
        memory of KV caches when they are allocated.
        """
        self.hardware = hardware
        self.kv_memory = HostKvMemory(reserved=reserves_kv)
        self._kernels = kernels
        self._packed = kernels == "native"
        self._record = record
        self._channels: dict[str, int] = {}

    def resident(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` [...]: graphs read host memory."""
        return tensor

    def fingerprint(self) -> Mapping[str, str | int | bool | None]:
        return {"compiler": self.name, "packed": self._packed, "kernels": self._kernels}

    def join(self, groups: Mapping[str, Group]) -> None:
        """Ranks of one host reduce through shared memory, others through torch.distributed."""
        library = native_library()
        if library is None:
            return
        for name, group in groups.items():
            number = open_channel(group, library)
            if number is not None:
                self._channels[name] = number

    def lower(self, program: Program) -> Program:
        return lower_graph(program, pack_linear=self._packed)

    def check(self, program: Program, inputs: Sequence[Tensor]) -> None:
        """Call every operator on meta inputs [...], to find mistakes before the first run."""
        check_shapes(program, inputs)

    def load(self, program: Program, spec: GraphSpec, tensors: Sequence[Tensor]) -> CompiledGraph:
        """As ``Compiler.load``: one tensor [...] per placeholder."""
        graph, inputs = fold_constants(program, tensors)
        use_channels(graph, self._channels)
        return EmulatedGraph(spec, graph, inputs, self._record)

    def read_binaries(self, data: bytes) -> bool:  # noqa: ARG002
        """Programs are all there is."""
        return True

    def write_binaries(self) -> None:
        """Programs are all there is."""
