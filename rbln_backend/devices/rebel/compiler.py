"""The RBLN SDK behind the compiler port; the only module that imports ``rebel``.

Nothing here has run on an NPU: no SDK exists on the machines this project is built on. The calls
are those that the vendor's vllm-rbln 0.12 makes, held to a double of the SDK which that release
was run against (``tests/sdk_double``, ``docs/npu.md``).
"""

from __future__ import annotations

import importlib
import itertools
import logging
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rbln_backend.collectives import Group, process_group_dict, use_functional_ops
from rbln_backend.config import RblnConfig
from rbln_backend.core import GraphSpec, Phase, UsefulRows
from rbln_backend.devices.port import (
    CompiledGraph,
    Compiler,
    KvMemory,
    find_npu,
    installed_sdk,
    npu_capabilities,
    wants_npu_tensors,
)
from rbln_backend.devices.rebel.limits import Npu
from rbln_backend.devices.rebel.memory import (
    BoundTensors,
    Moved,
    StaticKvMemory,
    TensorKvMemory,
)
from rbln_backend.devices.rebel.modules import as_dynamo_calls, get_module, mark
from rbln_backend.errors import CompileError, ConfigError, DeviceMemoryError
from rbln_backend.graphs.operators import signatures_digest
from rbln_backend.graphs.program import Program

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("SYS_ENOMEM: Out of memory", "SYS_EBUSY: Lack of device memory")
_LESS_KV = "Try reducing the number of blocks by setting --num-gpu-blocks-override."


def has_npu_tensors() -> bool:
    """Return True if torch-rbln, which adds torch's device ``rbln``, is installed and loads."""
    try:
        importlib.import_module("torch_rbln")
    except ImportError:
        return False
    return hasattr(torch, "rbln")


class RebelGraph:
    """A runtime returned by ``rbln_backend`` and the tensors it is called with."""

    def __init__(
        self,
        spec: GraphSpec,
        runtime: Callable[..., Any],
        bound: BoundTensors,
        held: list[Any],
    ) -> None:
        """``held``: the list in which the SDK keeps its runtimes; the graph's leaves it with it."""
        self.spec = spec
        self._runtime = runtime
        self._bound = bound
        weakref.finalize(self, _forget, held, runtime).atexit = False

    def run(self, useful: UsefulRows | None = None) -> tuple[Tensor, ...]:  # noqa: ARG002
        # Callers need not be in inference mode, in which a step's tensors are made.
        with torch.inference_mode():
            self._bound.fill()
            return tuple(self._runtime(*self._bound.arguments))

    def run_over(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """Run with ``tensor`` [...], an output of another graph on the NPU, as input ``name``."""
        self._bound.put(name, tensor)
        return self.run()

    def prepare(self) -> None:
        """The runtime was made when the graph was."""


class RebelCompiler:
    """Hands captured graphs to ``rbln_backend`` as vllm-rbln 0.12 does."""

    name = "rebel"

    def __init__(
        self,
        sdk: ModuleType,
        *,
        npu: Npu,
        cache_dir: Path | None,
        strict: bool,
        num_devices: int = 1,
        npu_tensors: bool = False,
        has_device: bool = True,
    ) -> None:
        """``npu_tensors``: weights, caches and buffers are torch's on the device ``rbln``.

        ``has_device``: False only compiles, for an NPU that is elsewhere. Raises ``ConfigError``
        for ``num_devices`` that the NPU does not take.
        """
        if num_devices > 1 and not npu.splits_tensors:
            raise ConfigError(
                f"num_devices_per_local_rank={num_devices}: one rank has one {npu.name}; use "
                "--tensor-parallel-size"
            )
        self._sdk = sdk
        self.hardware = npu.name
        self.capabilities = npu_capabilities(npu, copies_caches=npu_tensors)
        self._backend = importlib.import_module("rebel.core.torch_compile").rbln_backend
        self._moved = Moved(torch.device("rbln")) if npu_tensors else None
        self._num_devices = num_devices
        self._cache_dir = cache_dir
        self._runtimes: list[Any] = []
        modes = (["strict"] if strict else []) + ([] if has_device else ["compile_only"])
        self._options: dict[str, Any] = {
            "num_devices": num_devices,
            "mode": modes,
            "use_static_output": True,
            "_runtime_holder": self._runtimes,
        }
        if cache_dir is not None:
            self._options |= {"cache_dir": str(cache_dir), "mega_cache_only": True}
        self.kv_memory: KvMemory
        if self._moved is not None:
            self._options["model_trace_method"] = "export"
            aligned = importlib.import_module("rebel.kv_cache").aligned_tensor
            self.kv_memory = TensorKvMemory(self._moved.device, _no_room, aligned)
        else:
            context = self._sdk.CompileContext(use_weight_sharing=True, use_global_ctx=True)
            self._options["compile_context"] = context
            self.kv_memory = StaticKvMemory(context, self._runtimes)
        self._groups: Mapping[str, Group] = {}
        self._numbers = itertools.count()

    def resident(self, tensor: Tensor) -> Tensor:
        """As ``Compiler.resident``, tensor [...]; raises ``DeviceMemoryError``."""
        if self._moved is None:
            raise CompileError("without torch-rbln no tensor that graphs read can be written")
        try:
            return self._moved.resident(tensor)
        except RuntimeError as error:
            raise _no_room(error) from error

    def fingerprint(self) -> Mapping[str, str | int | bool | None]:
        version = str(getattr(self._sdk, "__version__", "unknown"))
        # Patch releases of the compiler are compatible with each other's artifacts.
        return {
            "compiler": self.name,
            "compiler_version": ".".join(version.split(".")[:2]),
            "ops": signatures_digest(),
            "npu": self.hardware,
            "num_devices": self._num_devices,
            "npu_tensors": self._moved is not None,
            "strict": "strict" in self._options["mode"],
        }

    def join(self, groups: Mapping[str, Group]) -> None:
        """Collectives are given to the SDK as torch's own, which name their process group."""
        self._groups = groups
        self._options["process_group_dict"] = process_group_dict()

    def lower(self, program: Program) -> Program:
        """The program as the store gives it: a warm start must hand over the very same graph.

        Else the SDK would not find what it compiled, by names of nodes that mean nothing.
        """
        try:
            return Program.from_bytes(program.to_bytes())
        except CompileError:
            # It runs, and whoever stores it tells what cannot be stored.
            return program

    def check(self, program: Program, inputs: Sequence[Tensor]) -> None:
        """Accept all inputs [...]: ``load`` calls every operator on shapes."""

    def load(self, program: Program, spec: GraphSpec, tensors: Sequence[Tensor]) -> CompiledGraph:
        """Compile over tensors [...], or fetch from the SDK's cache; raises ``CompileError``."""
        started = time.perf_counter()
        try:
            bound = BoundTensors(program.bindings, tensors, self._moved)
        except RuntimeError as error:
            raise _no_room(error) from error
        mark(program.bindings, bound.arguments)
        device = None if self._moved is None else self._moved.device
        module = get_module(program, bound.arguments, device)
        use_functional_ops(module.graph, self._groups)
        module.recompile()
        try:
            with as_dynamo_calls(module, bound.arguments, next(self._numbers)):
                runtime = self._backend(module, bound.arguments, options=self._get_options(spec))
        except RuntimeError as error:
            if any(marker in str(error) for marker in _OUT_OF_MEMORY):
                raise CompileError(
                    f"Not enough device memory for graph {spec}. {_LESS_KV}"
                ) from error
            raise CompileError(f"compiling graph {spec} failed: {error}") from error
        logger.info("Compile time of %s: SDK %.2f s", spec, time.perf_counter() - started)
        return RebelGraph(spec, runtime, bound, self._runtimes)

    def _get_options(self, spec: GraphSpec) -> dict[str, Any]:
        """Return the options of a graph; those that draw tokens are the vendor's sampler's.

        No binary of one is stored: the SDK would load it without the buffer of its seed.
        """
        if spec.phase is not Phase.SAMPLE:
            return dict(self._options)
        own = {"num_devices": 1, "use_static_output": False}
        return {name: self._options[name] for name in ("mode", "model_trace_method")} | own

    def read_binaries(self, data: bytes) -> bool:
        if self._cache_dir is None:
            return False
        bundles = self._bundles()
        # A real file, as the vendor's: the SDK may want more of it than ``read``.
        with tempfile.TemporaryFile(dir=self._cache_dir) as file:
            file.write(data)
            file.seek(0)
            return bundles.read_bundle(file) is not None

    def write_binaries(self) -> bytes | None:
        if self._cache_dir is None:
            return None
        bundles = self._bundles()
        with tempfile.TemporaryFile(dir=self._cache_dir) as file:
            if not bundles.write_bundle(file):
                return None
            file.seek(0)
            return file.read()

    def _bundles(self) -> Any:
        """The SDK's own store of what it compiled, over this rank's folder."""
        assert self._cache_dir is not None
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        bundles = importlib.import_module("rebel.core.mega_cache")
        bundles.set_dir(str(self._cache_dir))
        return bundles


def _forget(held: list[Any], runtime: object) -> None:
    held[:] = [other for other in held if other is not runtime]


def _no_room(error: Exception) -> Exception:
    """Return the exception for an allocation error of torch's device ``rbln``."""
    if any(marker in str(error) for marker in (*_OUT_OF_MEMORY, "out of memory")):
        return DeviceMemoryError(f"the NPU has no room: {error}. {_LESS_KV}")
    return error


def make_rebel_compiler(config: RblnConfig, cache_dir: Path | None) -> Compiler:
    """The SDK's compiler for the configured NPU; ``cache_dir``: this rank's own."""
    sdk, npu = installed_sdk(), find_npu(config)
    assert sdk is not None
    assert npu is not None
    found = sdk.get_npu_name(0)
    if found and config.force_npu_name not in (None, found):
        name = config.force_npu_name
        logger.warning("RBLN_FORCE_NPU_NAME=%s is ignored: the host has %s", name, found)
    has_device = bool(found)
    return RebelCompiler(
        sdk,
        npu=npu,
        cache_dir=cache_dir,
        strict=config.strict_mode,
        num_devices=config.num_devices_per_local_rank,
        npu_tensors=has_device and uses_npu_tensors(config),
        has_device=has_device,
    )


def uses_npu_tensors(config: RblnConfig) -> bool:
    """Return True if weights, caches and buffers are torch tensors on the NPU.

    Raises ``ConfigError`` if the configuration requires that and torch-rbln is missing, and if
    torch-rbln is installed and does not load.
    """
    if wants_npu_tensors(config):
        if has_npu_tensors():
            return True
        raise ConfigError(
            "torch-rbln is installed, but does not load; repair it, or let the SDK keep the KV "
            "caches with use_device_tensor: false (VLLM_RBLN_USE_DEVICE_TENSOR=0)"
        )
    if config.use_device_tensor:
        raise ConfigError(
            "use_device_tensor (VLLM_RBLN_USE_DEVICE_TENSOR) needs torch-rbln, which is not "
            "installed; unset it to let the SDK keep the KV caches"
        )
    return False


def uses_npu_collectives(config: RblnConfig) -> bool:
    """Return True if ranks' process groups are the SDK's, as the vendor's are with device tensors.

    Raises ``ConfigError`` as ``uses_npu_tensors``.
    """
    sdk = installed_sdk()
    has_device = sdk is not None and bool(sdk.get_npu_name(0))
    return has_device and config.device != "emulated" and uses_npu_tensors(config)
