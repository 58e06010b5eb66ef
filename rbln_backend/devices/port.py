"""The compiler port: what a device must offer so that the rest of the backend need not know it.

A *graph spec* names one static shape. The runner captures it once as an fx graph, a compiler
lowers that graph to a storable program and loads programs into callable *compiled graphs*.
Two exist: ``emulated`` (this host's CPU) and ``rebel`` (the RBLN SDK). Callers branch on the fields
of ``Capabilities``, never on the device's name.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Protocol

from rbln_backend.config import RblnConfig
from rbln_backend.devices.rebel.limits import Npu
from rbln_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from rbln_backend.collectives import Group
    from rbln_backend.core import GraphSpec, HeadCopy, UsefulRows, WindowRestore, WindowStore
    from rbln_backend.graphs.program import Program

Device = Literal["emulated", "rebel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Differences between devices that code above the compiler port needs."""

    device: Device
    """For reports and error texts only."""
    runs_on_host: bool = False
    """Graphs run in this process, with kernels and layers of our own, in host memory."""
    general_attention: bool = False
    """Ops of our own, with soft caps, ALiBi, caches that layers share, e4m3 caches of windows, and
    every head size, also of latent attention; otherwise the SDK's, which have none of these."""
    packed_weights: bool = False
    """Kernels for quantized words as they are; otherwise int8 weights of symmetric formats."""
    picks_tokens: bool = False
    """Graphs can end in an op that picks the token of the largest logit."""
    fused_experts: bool = False
    """One SDK op computes a layer of experts."""
    copies_caches: bool = False
    """Blocks of KV caches can be copied to host memory and back, and LoRA slots be written between
    two runs of a graph."""
    keeps_axes: bool = False
    """Layers take hidden states with axes of batch and sequence, not rows of tokens."""
    appends_windows: bool = False
    """Sliding windows lie in pages; otherwise a window is one block whose content is shifted."""
    stores_binaries: bool = False
    """Graphs are compiled by ``Compiler.load``, not by capture and ``lower``: besides programs, the
    store holds what the device's compiler made of them."""
    longest_first: bool = False
    """Decode kernels skip the rows after the last one that reaches into a block."""
    npu: Npu | None = None
    """Product, memory and shape limits of the NPU; None: host memory, any shape."""

    @property
    def product(self) -> str:
        """The NPU's name in error texts, else the device's."""
        return self.device if self.npu is None else self.npu.name


EMULATED = Capabilities(
    device="emulated",
    runs_on_host=True,
    general_attention=True,
    packed_weights=True,
    copies_caches=True,
)


def npu_capabilities(npu: Npu, *, copies_caches: bool = False) -> Capabilities:
    """Return the capabilities of ``npu`` under the RBLN SDK.

    ``copies_caches``: torch-rbln has the KV caches, not the runtimes of the SDK.
    """
    return Capabilities(
        device="rebel",
        picks_tokens=True,
        fused_experts=True,
        copies_caches=copies_caches,
        stores_binaries=True,
        keeps_axes=True,
        appends_windows=npu.appends_windows,
        longest_first=npu.wants_longest_first,
        npu=npu,
    )


class CompiledGraph(Protocol):
    """A graph bound to its weights, KV caches and input buffers; runs without arguments."""

    spec: GraphSpec

    def run(self, useful: UsefulRows | None = None) -> tuple[Tensor, ...]:
        """Run once over the bound buffers and return outputs [...] as ``GraphSpec``'s phase says.

        A device may skip rows that are not ``useful``; their outputs then hold anything. Outputs
        may be overwritten by the next run. They lie in host memory or on the device, from
        where a reader copies them (``Tensor.cpu``).
        """
        ...

    def prepare(self) -> None:
        """Do what the first run does besides computing, so that it is as fast as any other."""
        ...


class KvMemory(Protocol):
    """Where a device keeps the KV caches of a rank; besides graphs, nothing else touches them."""

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new cache of ``shape`` [num_blocks, ...] and ``dtype``, shared by all graphs.

        Called before the first ``Compiler.load``. ``name`` is a layer's, or a prefix log's. The
        initial content is not read.
        """
        ...

    def copy_heads(self, caches: Sequence[Tensor], copies: Sequence[HeadCopy]) -> None:
        """Copy the first tokens of blocks in each cache [num_blocks, 2, Hkv, 1, block_size, D].

        ``caches`` are those of one KV cache group, that of all ``copies``.
        """
        ...

    def read_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """Copy tokens from ``slot`` of a block of ``cache`` [num_blocks, ...] into host memory.

        page [2, Hkv, 1, tokens, D], or [1, ...] where values are cached within keys: the shape of
        a block in ``cache`` but for its tokens.
        """
        ...

    def write_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """Copy ``page`` [2, Hkv, 1, tokens, D], as ``read_tokens`` gave it, to a block."""
        ...

    def shared_blocks(self, cache: Tensor) -> Tensor:
        """Return host memory [num_blocks, ...] of ``cache``, which other servers read and fill.

        It is ``cache`` itself where that is in host memory. Otherwise ``read_tokens`` and
        ``write_tokens`` move blocks between the two.
        """
        ...

    def restore_window(self, cache: Tensor, log: Tensor, move: WindowRestore) -> None:
        """The last tokens before ``move.num_tokens`` go from the log to a block, left-aligned.

        cache [num_blocks, 2, Hkv, 1, window, D], log [num_pages, 2, Hkv, 1, page_tokens, D].
        """
        ...

    def store_window(self, cache: Tensor, log: Tensor, move: WindowStore) -> None:
        """Copy one page of tokens, from ``move.slot`` of a block on, to the log.

        cache [num_blocks, 2, Hkv, 1, window, D], log [num_pages, 2, Hkv, 1, page_tokens, D].
        """
        ...


class Compiler(Protocol):
    """One device's compiler."""

    name: str
    hardware: str
    """User-facing name of the hardware: an instruction set or an NPU's name."""
    capabilities: Capabilities

    @property
    def kv_memory(self) -> KvMemory: ...

    def resident(self, tensor: Tensor) -> Tensor:
        """Return what graphs read in the place of ``tensor`` [...], which is no weight.

        It may be written between two runs, by copies of its shape or of contiguous parts. What
        ``tensor`` itself holds is not read again.
        """
        ...

    def fingerprint(self) -> Mapping[str, str | int | bool | None]:
        """Everything about the device and its tool chain that changes a program (cache key).

        What only changes how fast a program runs is not part of it.
        """
        ...

    def join(self, groups: Mapping[str, Group]) -> None:
        """Connect the ranks of each collective group, once and before the first ``load``.

        Every rank of each group calls it at the same time.
        """
        ...

    def lower(self, program: Program) -> Program:
        """Rewrite a captured program for the device; raises ``CompileError``."""
        ...

    def check(self, program: Program, inputs: Sequence[Tensor]) -> None:
        """Raise ``CorruptArtifactError`` for a lowered program that does not fit its tensors.

        ``inputs``: a meta tensor [...] per placeholder, with shape and dtype of the real one.
        """
        ...

    def load(self, program: Program, spec: GraphSpec, tensors: Sequence[Tensor]) -> CompiledGraph:
        """Make ``program`` callable over ``tensors``, one [...] per placeholder, in order."""
        ...

    def read_binaries(self, data: bytes) -> bool:
        """Take what ``write_binaries`` of another process gave, before the first ``load``.

        False where it cannot be read; the graphs are compiled then.
        """
        ...

    def write_binaries(self) -> bytes | None:
        """Return compiled binaries for other processes, after the last ``load``, or None."""
        ...


@functools.cache
def device_capabilities(config: RblnConfig) -> Capabilities:
    """Return the capabilities of the device that this process compiles for.

    An NPU is used where ``device='rebel'`` or a name requires one, or the SDK finds one. The SDK is
    asked once: every layer of a model needs the answer. Raises ``ConfigError`` where a required NPU
    is missing, or an installed SDK does not load.
    """
    npu = find_npu(config)
    if npu is None:
        return EMULATED
    return npu_capabilities(npu, copies_caches=wants_npu_tensors(config))


def wants_npu_tensors(config: RblnConfig) -> bool:
    """Return whether torch-rbln is installed and not switched off; engines load it."""
    return config.use_device_tensor is not False and find_spec("torch_rbln") is not None


def find_npu(config: RblnConfig) -> Npu | None:
    """Return the NPU to compile for, or None for the emulated device."""
    if config.device == "emulated":
        return None
    sdk = installed_sdk()
    if sdk is None:
        if config.device == "rebel":
            setting = "device='rebel'"
        elif config.force_npu_name:
            setting = f"force_npu_name={config.force_npu_name!r} (RBLN_FORCE_NPU_NAME)"
        else:
            return None
        raise ConfigError(
            f"{setting} needs the RBLN SDK, but the module 'rebel' is not installed; "
            "install the 'npu' extra or use device='emulated'"
        )
    # The one found, else the one forced, as in vllm-rbln; e.g. ``RBLN-CR13``.
    name = sdk.get_npu_name(0) or config.force_npu_name
    if name:
        return Npu.named(str(name))
    if config.device == "rebel":
        raise ConfigError(
            "device='rebel' found no NPU; set RBLN_FORCE_NPU_NAME to compile without one"
        )
    return None


def installed_sdk() -> ModuleType | None:
    """The module ``rebel``, or None where it is not installed.

    Raises ``ConfigError`` where it is installed and does not load, whatever it raised: running
    emulated on a host with an NPU is nothing that should happen unasked.
    """
    try:
        return importlib.import_module("rebel")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "rebel":
            return None
        raise ConfigError(
            "the RBLN SDK is installed, but 'import rebel' fails with "
            f"{type(error).__name__}: {error}; mend the installation or use device='emulated'"
        ) from error
