"""Compiled graphs from the artifact store, or captured where the store lacks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from rbln_backend.attention.metadata import RblnAttentionMetadata
from rbln_backend.compiler.capture import capture
from rbln_backend.compiler.port import CompiledGraph, Compiler
from rbln_backend.compiler.programs.program import Program
from rbln_backend.compiler.tensor_table import TensorTable
from rbln_backend.core import GraphSpec
from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.store.artifact_files import BINARIES, PROGRAM
from rbln_backend.store.artifacts import ArtifactStore
from rbln_backend.store.cache_key import CacheKey
from rbln_backend.vllm_compat.surface import init_logger
from rbln_backend.worker.graphs.capture_pool import capture_in_children
from rbln_backend.worker.graphs.functions import WHOLE, GraphFunction, ModelPart, graph_function

logger = init_logger(__name__)

Result = Literal["compiled", "loaded"]
LayerMetadata = Mapping[str, RblnAttentionMetadata]


class GraphRequest(NamedTuple):
    """A graph to make: its shape, its input buffers, and the attention metadata of the step."""

    spec: GraphSpec
    inputs: Mapping[str, Tensor]
    metadata: LayerMetadata | None


ForwardContext = Callable[[GraphRequest], AbstractContextManager[Any]]
"""Sets the context that the model reads while it is captured."""


class GraphListener(Protocol):
    """Receives the progress of a warm-up."""

    def graph_started(self, spec: GraphSpec) -> None:
        """Called when the capture or load of a graph begins."""
        ...

    def graph_done(self, spec: GraphSpec, result: Result, seconds: float) -> None:
        """Called when a graph was captured or loaded."""
        ...


class NoListener:
    """Ignores progress."""

    def graph_started(self, spec: GraphSpec) -> None:
        pass

    def graph_done(self, spec: GraphSpec, result: Result, seconds: float) -> None:
        pass


def graph_key(
    fields: Mapping[str, Any], fingerprint: Mapping[str, Any], spec: GraphSpec
) -> CacheKey:
    """Return the key of a graph; ``fields`` are those that all graphs of an engine share."""
    own: dict[str, Any] = {
        "device": dict(fingerprint),
        "phase": spec.phase_name,
        "bucket": spec.bucket,
    }
    if spec.length > 1:
        own["length"] = spec.length
    if spec.prompts > 1:
        own["prompts"] = spec.prompts
    return CacheKey({**fields, **own})


def binaries_key(
    fields: Mapping[str, Any], fingerprint: Mapping[str, Any], specs: Iterable[GraphSpec]
) -> CacheKey:
    """Return the key of the binaries that a device's compiler made of an engine's graphs."""
    names: list[Any] = sorted(map(str, specs))
    own: dict[str, Any] = {"device": dict(fingerprint), "phase": "binaries", "graphs": names}
    return CacheKey({**fields, **own})


class GraphFactory:
    """Makes compiled graphs of graph specs; ``store`` is None if the cache is off."""

    def __init__(
        self,
        *,
        model: nn.Module,
        compiler: Compiler,
        table: TensorTable,
        store: ArtifactStore | None,
        key_fields: Mapping[str, Any],
        forward_context: ForwardContext,
        part: ModelPart = WHOLE,
        capture_workers: int = 1,
    ) -> None:
        """``capture_workers``: processes that capture in parallel if several graphs are missing."""
        self._model = model
        self._part = part
        self._compiler = compiler
        self._table = table
        self._store = store
        self._key_fields = dict(key_fields)
        self._forward_context = forward_context
        self.capture_workers = capture_workers
        self.compiles_when_loading = compiler.compiles_when_loading

    def key(self, spec: GraphSpec) -> CacheKey:
        return graph_key(self._key_fields, self._compiler.fingerprint(), spec)

    def is_stored(self, spec: GraphSpec) -> bool:
        """Return True if the store has an entry for the graph, intact or not."""
        return self._store is not None and self._store.has(self.key(spec))

    def build(self, request: GraphRequest) -> tuple[CompiledGraph, Result, float]:
        """Return one graph outside a warm-up, how it was obtained and the seconds it took.

        Raises ``CompileError``.
        """
        started = time.perf_counter()
        with self._lock(request.spec):
            result: Result = "loaded"
            program = self._stored(request)
            if program is None:
                result, program = "compiled", self._capture(request)
                self._save(request, program)
        return self.bind(request, program), result, time.perf_counter() - started

    def obtain_all(
        self, requests: Sequence[GraphRequest], listener: GraphListener
    ) -> dict[GraphSpec, Program]:
        """Return the program of every request, loaded or captured; raises ``CompileError``."""
        programs: dict[GraphSpec, Program] = {}
        missing: dict[GraphSpec, GraphRequest] = {}
        locks: dict[GraphSpec, ExitStack] = {}
        # Of several processes that need a graph, one compiles it and the others wait and load it.
        # All take the locks in the order of the plan, which excludes a deadlock.
        with ExitStack() as held:
            for request in requests:
                lock = locks[request.spec] = held.enter_context(ExitStack())
                lock.enter_context(self._lock(request.spec))
                started = time.perf_counter()
                program = self._stored(request)
                if program is None:
                    missing[request.spec] = request
                    continue
                lock.close()
                listener.graph_started(request.spec)
                listener.graph_done(request.spec, "loaded", time.perf_counter() - started)
                programs[request.spec] = program
            for spec, program, seconds in self._capture_all(missing, listener):
                self._save(missing[spec], program)
                locks[spec].close()
                listener.graph_done(spec, "compiled", seconds)
                programs[spec] = program
        return programs

    def pack_weights(self, programs: Iterable[Program]) -> None:
        """Pack the weights into the layout that ``programs``, all that will run, read."""
        self._table.pack_weights(chain.from_iterable(program.bindings for program in programs))

    def bind(self, request: GraphRequest, program: Program) -> CompiledGraph:
        """Return ``program`` as a graph over the model's tensors and the request's buffers."""
        tensors = self._table.resolve_all(program.bindings, request.inputs)
        return self._compiler.load(program, request.spec, tensors)

    def restore_binaries(self, specs: Sequence[GraphSpec]) -> bool:
        """Load the compiler's binaries of these graphs; False if they are not stored."""
        if self._store is None:
            return False
        files = self._store.load_code(self._binaries_key(specs))
        return files is not None and self._compiler.read_binaries(files[BINARIES])

    def save_binaries(self, specs: Sequence[GraphSpec]) -> None:
        """Store the compiler's binaries of these graphs, if it has any."""
        if self._store is None:
            return
        key = self._binaries_key(specs)
        with self._store.lock(key):
            data = self._compiler.write_binaries()
            if data is not None:
                self._store.store(key, {BINARIES: data})

    def has_binaries(self, specs: Sequence[GraphSpec]) -> bool:
        """Return True if the store has the binaries of these graphs, or if there are none."""
        if not self.compiles_when_loading:
            return True
        return self._store is not None and self._store.has(self._binaries_key(specs))

    def _binaries_key(self, specs: Sequence[GraphSpec]) -> CacheKey:
        return binaries_key(self._key_fields, self._compiler.fingerprint(), specs)

    def build_other(
        self, request: GraphRequest, function: GraphFunction, names: Sequence[str]
    ) -> CompiledGraph:
        """Return a graph of another ``function`` over the model's tensors; it is never stored.

        ``names`` are its inputs. Raises ``CompileError``.
        """
        return self.bind(request, self._capture_function(request, function, names))

    def _capture_all(
        self, missing: Mapping[GraphSpec, GraphRequest], listener: GraphListener
    ) -> Iterator[tuple[GraphSpec, Program, float]]:
        left = dict(missing)
        if self.capture_workers > 1 and len(left) > 1:
            for captured in capture_in_children(
                list(left),
                lambda spec: self._capture(missing[spec]).to_bytes(),
                workers=self.capture_workers,
                on_start=listener.graph_started,
            ):
                del left[captured.spec]
                yield captured.spec, Program.from_bytes(captured.data), captured.seconds
        for spec, request in left.items():
            listener.graph_started(spec)
            started = time.perf_counter()
            program = self._capture(request)
            yield spec, program, time.perf_counter() - started

    def _lock(self, spec: GraphSpec) -> AbstractContextManager[object]:
        return nullcontext() if self._store is None else self._store.lock(self.key(spec))

    def _stored(self, request: GraphRequest) -> Program | None:
        return None if self._store is None else self._load(self._store, request)

    def _save(self, request: GraphRequest, program: Program) -> None:
        if self._store is None:
            return
        try:
            data = program.to_bytes()
            # A stored program that fails this check would be compiled again by every start.
            self._check(program, request)
        except (CompileError, CorruptArtifactError) as error:
            logger.warning("Graph %s runs but cannot be cached: %s", request.spec, error)
            return
        self._store.store(self.key(request.spec), {PROGRAM: data})

    def _check(self, program: Program, request: GraphRequest) -> None:
        """Raise if ``program`` does not fit the model's tensors and the request's buffers."""
        self._compiler.check(program, self._table.shapes_of(program.bindings, request.inputs))

    def _load(self, store: ArtifactStore, request: GraphRequest) -> Program | None:
        key = self.key(request.spec)
        files = store.load(key)
        if files is None:
            return None
        try:
            program = Program.from_bytes(files[PROGRAM])
            self._check(program, request)
        except (CorruptArtifactError, CompileError, KeyError) as error:
            # The files are intact but do not make a program for this model: rebuild them.
            store.quarantine(key.digest, str(error))
            return None
        return program

    def _capture(self, request: GraphRequest) -> Program:
        own = graph_function(request.spec.phase, self._model, self._part)
        return self._capture_function(request, *own)

    def _capture_function(
        self, request: GraphRequest, function: GraphFunction, names: Sequence[str]
    ) -> Program:
        args = tuple(request.inputs[name] for name in names)
        began = time.perf_counter()
        with self._forward_context(request):
            captured = capture(function, args, self._table, request.inputs)
            lowering_began = time.perf_counter()
            lowered = self._compiler.lower(captured)
        logger.debug(
            "Compile time of %s: Dynamo %.2f s, graph lowering %.2f s",
            *(request.spec, lowering_began - began, time.perf_counter() - lowering_began),
        )
        return lowered
