"""The compiler port: what a device must offer so that the rest of the backend need not know it.

A *graph spec* names one static shape. The runner captures it once as an fx graph, a compiler
lowers that graph to a storable program and loads programs into callable *compiled graphs*.
Two exist: ``emulated_compiler`` (this host's CPU) and ``rebel_compiler`` (the RBLN SDK).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from rbln_backend.compiler.capabilities import Capabilities
    from rbln_backend.compiler.programs.program import Program
    from rbln_backend.core import GraphSpec, HeadCopy, UsefulRows, WindowRestore, WindowStore
    from rbln_backend.parallel.collectives import Group


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


class SamplingGraph(CompiledGraph, Protocol):
    """A graph that reads an output of another one in the memory of the device."""

    def run_over(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """Run with ``tensor`` [...], which the device has, as the input ``name``."""
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
    compiles_when_loading: bool
    """Most of the time of a graph goes into ``load``, not into capture and ``lower``."""

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
