"""The RBLN SDK behind the compiler port; the only module that imports ``rebel``.

Nothing here has run on an NPU: no SDK exists on the machines this project is built on. The calls
follow the documented interface (backend callable, option keys, ``CompileContext``), and contract
tests check them against a scripted stand-in of that interface.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, fx, nn

from rbln_backend.compiler.port import CompiledGraph, GraphSpec
from rbln_backend.compiler.program import Program
from rbln_backend.compiler.tensor_table import INPUT, KV
from rbln_backend.errors import CompileError
from rbln_backend.parallel.collectives import Group
from rbln_backend.parallel.functional import process_group_dict, use_functional_ops

_OUT_OF_MEMORY = ("SYS_ENOMEM: Out of memory", "SYS_EBUSY: Lack of device memory")


def find_sdk() -> ModuleType | None:
    """The ``rebel`` module, or None where the SDK is not installed."""
    try:
        return importlib.import_module("rebel")
    except ImportError:
        return None


def npu_name(sdk: ModuleType, forced_name: str | None) -> str | None:
    """The NPU's name, e.g. ``RBLN-CR13``; ``forced_name`` stands in on a host without one."""
    name = forced_name or sdk.get_npu_name()
    return str(name) if name else None


class RebelGraph:
    """A runtime returned by ``rbln_backend`` and the tensors it is called with."""

    def __init__(
        self, spec: GraphSpec, runtime: Callable[..., Any], tensors: Sequence[Tensor]
    ) -> None:
        self.spec = spec
        self._runtime = runtime
        self._tensors = list(tensors)

    def run(self) -> tuple[Tensor, ...]:
        outputs = self._runtime(*self._tensors)
        return outputs if isinstance(outputs, tuple) else tuple(outputs)

    def prepare(self) -> None:
        """The runtime was made when the graph was."""


class RebelCompiler:
    """Hands captured graphs to ``rbln_backend`` with the documented options."""

    name = "rebel"

    def __init__(
        self,
        sdk: ModuleType,
        *,
        device: str,
        cache_dir: Path | None,
        strict: bool,
        num_devices: int = 1,
    ) -> None:
        self._sdk = sdk
        self.hardware = device
        self._backend = importlib.import_module("rebel.core.torch_compile").rbln_backend
        self._context = sdk.CompileContext(use_weight_sharing=True)
        options: dict[str, Any] = {
            "compile_context": self._context,
            "num_devices": num_devices,
            "process_group_dict": {},
            "mode": "strict" if strict else None,
            "cache_dir": str(cache_dir) if cache_dir else None,
        }
        # The SDK's callers drop empty values before the call.
        self._options = {key: value for key, value in options.items() if value not in (None, "")}
        self._groups: Mapping[str, Group] = {}

    def fingerprint(self) -> Mapping[str, str | int | bool | None]:
        version = str(getattr(self._sdk, "__version__", "unknown"))
        # Patch releases of the compiler are compatible with each other's artifacts.
        return {
            "compiler": self.name,
            "compiler_version": ".".join(version.split(".")[:2]),
            "npu": self.hardware,
            "num_devices": int(self._options["num_devices"]),
        }

    def adopt_kv_caches(self, caches: Mapping[str, Tensor]) -> None:
        """Give each cache a fixed device address, so that all graphs address the same memory."""
        for name, cache in caches.items():
            self._context.mark_static_address(cache, name)

    def join(self, groups: Mapping[str, Group]) -> None:
        """Collectives are given to the SDK as torch's own, which name their process group."""
        self._groups = groups
        self._options["process_group_dict"] = process_group_dict(groups)

    def lower(self, program: Program) -> Program:
        return program

    def load(self, program: Program, spec: GraphSpec, tensors: Sequence[Tensor]) -> CompiledGraph:
        """Compile, or fetch from the SDK's own cache; raises ``CompileError``."""
        holder: list[Any] = []
        options = {**self._options, "_runtime_holder": holder}
        module, inputs = _with_weights_inside(program, tensors)
        use_functional_ops(module.graph, self._groups)
        module.recompile()
        try:
            runtime = self._backend(module, inputs, options=options)
        except RuntimeError as error:
            if any(marker in str(error) for marker in _OUT_OF_MEMORY):
                raise CompileError(
                    f"Not enough device memory for graph {spec}. Try reducing the number of blocks"
                    " by setting --num-gpu-blocks-override."
                ) from error
            raise CompileError(f"compiling graph {spec} failed: {error}") from error
        return RebelGraph(spec, runtime, inputs)


def _with_weights_inside(
    program: Program, tensors: Sequence[Tensor]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The program as a module that owns its weights, and the tensors left as inputs.

    The SDK wants parameters as attributes: a graph input would go to the device at every call.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    owner, inputs = nn.Module(), []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name, tensor in zip(placeholders, program.bindings, tensors, strict=True):
        if name.startswith((INPUT, KV)):
            inputs.append(tensor)
            continue
        owner.register_buffer(node.name, tensor.detach())
        with graph.inserting_before(node):
            weight = graph.get_attr(node.name)
        node.replace_all_uses_with(weight)
        graph.erase_node(node)
    return fx.GraphModule(owner, graph), inputs
