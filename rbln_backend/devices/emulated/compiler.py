"""The emulated device behind the compiler port: captured programs run on this host's CPU.

Shapes, addresses and views of a bound graph never change, so a graph's first run is recorded, and
later runs repeat what computes, over the memory it used. The native library records its own calls
(``kernels/bindings/replay.h``) and repeats a series of them at once; any other operator is called
again over the same tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rbln_backend.collectives import Group, open_channel, use_channels
from rbln_backend.config import RblnConfig
from rbln_backend.core import GraphSpec, UsefulRows
from rbln_backend.devices.emulated.build import BuildReport, can_build, no_op
from rbln_backend.devices.emulated.kernel_set import (
    KernelSet,
    Recording,
    StartRecording,
    find_built,
    kernel_stores,
    load_kernels,
    native_library,
    start_recording,
)
from rbln_backend.devices.emulated.lowering import fold_constants, lower_graph
from rbln_backend.devices.emulated.memory import HostKvMemory
from rbln_backend.devices.port import EMULATED, CompiledGraph, Compiler
from rbln_backend.graphs.call_list import CallList
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import check_shapes

logger = logging.getLogger(__name__)

Step = Callable[[], object]


class Recorder(TorchDispatchMode):
    """Records what runs inside its ``with`` block."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_repeatable = True
        """False once an operator read a value: then a run may depend on more than its calls."""
        self._recording = recording
        self._steps: list[Step | tuple[int, int]] = []
        self._writers: dict[int, tuple[int, int]] = {}
        """By address: the number of steps, and of native calls, up to the last that wrote there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import Dynamo, 0.7 s, to keep it out of `__torch_dispatch__`.
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        latest = self._steps[-1] if self._steps else None
        if calls := self._recording.take_new():
            if isinstance(latest, tuple):
                calls = latest[0], calls[1]
                self._steps.pop()
            self._steps.append(calls)
        else:
            self._add_operator(func, args, kwargs, results)
        latest = self._steps[-1] if self._steps else None
        place = len(self._steps), latest[1] if isinstance(latest, tuple) else 0
        written = (results, args, kwargs) if func._schema.is_mutable else results
        self._writers |= {_address(tensor): place for tensor in _tensors(written)}
        return results

    def is_native(self) -> bool:
        """Return True if the steps are calls of the native library alone."""
        return all(isinstance(step, tuple) for step in self._steps)

    def steps(self) -> list[Step]:
        """Return the recorded steps of a run, in order."""
        return self._repeated(self._steps)

    def steps_to(self, output: Tensor) -> list[Step]:
        """Return the steps up to the last that writes to an output [...] of the run."""
        count, end = self._writers.get(_address(output), (0, 0))
        if not count:
            return self.steps()
        steps, last = self._steps[:count], self._steps[count - 1]
        if isinstance(last, tuple):
            steps[-1] = (last[0], end)
        return self._repeated(steps)

    def cache_steps(self) -> list[Step]:
        """Return the steps up to the last write of a KV cache; empty where that is not recorded.

        Nothing but the caches is computed.
        """
        last, replay = self._recording.last_cache_write, self._recording.replay
        steps: list[Step] = []
        if last is None:
            return steps
        for step in self._steps:
            if not isinstance(step, tuple):
                steps.append(step)
            elif step[0] <= last < step[1]:
                return [*steps, partial(replay, step[0], last + 1, only_writes=True)]
            else:
                steps.append(partial(replay, *step))
        return []

    def _repeated(self, steps: Sequence[Step | tuple[int, int]]) -> list[Step]:
        replay = self._recording.replay
        return [partial(replay, *step) if isinstance(step, tuple) else step for step in steps]

    def _add_operator(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> None:
        if torch.Tag.data_dependent_output in func.tags:
            self.is_repeatable = False
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        made = _tensors(results)
        # The others are views, which stay what they are.
        fresh = [_address(tensor) not in given for tensor in made]
        call = partial(func, *args, **kwargs)
        if any(fresh):
            names = None if func._schema.is_mutable or not all(fresh) else _out_names(func)
            if names is None:
                self._steps.append(partial(_refresh, call, made, fresh))
            else:
                overload, outs = names
                targets = dict(zip(outs, made, strict=True))
                self._steps.append(partial(overload, *args, **kwargs, **targets))
        elif func._schema.is_mutable:
            self._steps.append(call)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refresh(call: Callable[[], Any], made: Sequence[Tensor], fresh: Sequence[bool]) -> None:
    """Call again and put what comes out where the first results are."""
    for target, is_fresh, value in zip(made, fresh, _tensors(call()), strict=True):
        if is_fresh:
            target.copy_(value)


def _out_names(func: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """The overload that writes its results into given tensors, and what it calls those."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        arguments = overload._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) == len(func._schema.returns) and rest == wanted:
            return overload, outs
    return None


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
        spec, set_useful = self.spec, self._set_useful_rows
        if useful is None or set_useful is None:
            return self._run(self._steps)
        if useful.reads_hidden:
            steps = self._steps
        else:
            # Other outputs keep what they hold.
            steps = self._logits_steps if useful.ends else self._cache_steps or self._logits_steps
        set_useful(spec.bucket, useful.rows, spec.prompts, useful.ends)
        try:
            return self._run(steps)
        finally:
            set_useful(0, 0, 0, 0)

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
            self._is_native = recorder.is_native()
            self._cache_steps = recorder.cache_steps()
        else:
            self._record = None
        return outputs


class EmulatedCompiler:
    """Lowers programs to the emulator's kernels; nothing is built at run time."""

    name = "emulated"
    capabilities = EMULATED

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
        if library := native_library():
            opened = {name: open_channel(group, library) for name, group in groups.items()}
            self._channels |= {name: x for name, x in opened.items() if x is not None}

    def lower(self, program: Program) -> Program:
        return lower_graph(program, pack_linear=self._packed)

    def check(self, program: Program, inputs: Sequence[Tensor]) -> None:
        """Call every operator on meta inputs [...], to find mistakes before the first run."""
        check_shapes(program, inputs)

    def load(self, program: Program, spec: GraphSpec, tensors: Sequence[Tensor]) -> CompiledGraph:
        graph, inputs = fold_constants(program, tensors)
        use_channels(graph, self._channels)
        return EmulatedGraph(spec, graph, inputs, self._record)

    def read_binaries(self, data: bytes) -> bool:  # noqa: ARG002
        """Programs are all there is."""
        return True

    def write_binaries(self) -> None:
        """Programs are all there is."""


def builds_kernels(config: RblnConfig) -> bool:
    """Return True if an emulated compiler has to build its kernels first."""
    stores = kernel_stores(config.cache_root, config.cache_bundles)
    return config.kernels != "aten" and can_build() and find_built(stores) is None


def make_emulated_compiler(
    config: RblnConfig, report: BuildReport = no_op
) -> tuple[Compiler, KernelSet]:
    """The emulated compiler over the kernels that could be built or loaded here.

    ``report`` gets the progress of a build.
    """
    kernels = load_kernels(
        Path(config.cache_root),
        config.kernels,
        bundles=[Path(x) for x in config.cache_bundles],
        report=report,
    )
    # A profile shows operators, which recorded calls are not.
    record = None if kernels.name == "aten" or config.profiler else start_recording
    compiler = EmulatedCompiler(
        kernels.name,
        hardware=kernels.isa,
        record=record,
        reserves_kv=config.kv_cache_pages == "reserved",
    )
    return compiler, kernels
