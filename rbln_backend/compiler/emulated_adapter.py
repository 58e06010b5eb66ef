"""The emulated device behind the compiler port: captured programs run on this host's CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, fx

from rbln_backend.compiler.lowering import lower_graph
from rbln_backend.compiler.port import CompiledGraph, GraphSpec
from rbln_backend.compiler.program import Program


class EmulatedGraph:
    """The program as one Python function of kernel calls over fixed tensors."""

    def __init__(self, spec: GraphSpec, graph: fx.Graph, tensors: Sequence[Tensor]) -> None:
        self.spec = spec
        self._function: Callable[..., tuple[Tensor, ...]] = fx.GraphModule({}, graph).forward
        self._tensors = tuple(tensors)

    def run(self) -> tuple[Tensor, ...]:
        return self._function(*self._tensors)


class EmulatedCompiler:
    """Lowers programs to the emulator's kernels; nothing is built at run time."""

    name = "emulated"

    def __init__(self, fingerprint: Mapping[str, str | int | bool | None], *, packed: bool) -> None:
        """``fingerprint`` identifies the kernel set; ``packed``: linear weights are repacked."""
        self._fingerprint = dict(fingerprint)
        self._packed = packed

    def fingerprint(self) -> Mapping[str, str | int | bool | None]:
        return {"compiler": self.name, "packed": self._packed, **self._fingerprint}

    def adopt_kv_caches(self, caches: Mapping[str, Tensor]) -> None:
        """Host memory needs no fixed addresses: graphs share caches by being given the tensors."""

    def lower(self, program: Program) -> Program:
        return lower_graph(program, pack_linear=self._packed)

    def load(self, program: Program, spec: GraphSpec, tensors: Sequence[Tensor]) -> CompiledGraph:
        return EmulatedGraph(spec, program.graph, tensors)
