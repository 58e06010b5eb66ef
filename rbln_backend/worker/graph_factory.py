"""Makes one compiled graph: from the artifact store if it is there, else by capture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor, nn

from rbln_backend.attention.metadata import RblnAttentionMetadata
from rbln_backend.compiler.artifact_store import ArtifactStore
from rbln_backend.compiler.cache_key import CacheKey
from rbln_backend.compiler.capture import capture
from rbln_backend.compiler.port import CompiledGraph, Compiler, GraphSpec
from rbln_backend.compiler.program import Program
from rbln_backend.compiler.tensor_table import TensorTable
from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.vllm_compat.surface import init_logger
from rbln_backend.worker.graph_functions import graph_function

logger = init_logger(__name__)

Result = Literal["compiled", "loaded"]
LayerMetadata = Mapping[str, RblnAttentionMetadata]
ForwardContext = Callable[[LayerMetadata | None], AbstractContextManager[Any]]
PROGRAM_FILE = "program.json"


class GraphFactory:
    """Owns the way from a graph spec to a compiled graph; the store may be None (cache off)."""

    def __init__(
        self,
        *,
        model: nn.Module,
        compiler: Compiler,
        table: TensorTable,
        store: ArtifactStore | None,
        key_fields: Mapping[str, Any],
        forward_context: ForwardContext,
    ) -> None:
        self._model = model
        self._compiler = compiler
        self._table = table
        self._store = store
        self._key_fields = dict(key_fields)
        self._forward_context = forward_context
        self._bound_names: set[str] = set()

    def key(self, spec: GraphSpec) -> CacheKey:
        return CacheKey(
            {
                **self._key_fields,
                "device": dict(self._compiler.fingerprint()),
                "phase": spec.phase_name,
                "bucket": spec.bucket,
            }
        )

    def build(
        self, spec: GraphSpec, inputs: Mapping[str, Tensor], metadata: LayerMetadata | None
    ) -> tuple[CompiledGraph, Result, float]:
        """The graph, how it was obtained and the seconds it took; raises ``CompileError``."""
        started = time.perf_counter()
        program, result = self._obtain(spec, inputs, metadata)
        tensors = self._table.resolve_all(program.bindings, inputs)
        graph = self._compiler.load(program, spec, tensors)
        self._bound_names.update(program.bindings)
        return graph, result, time.perf_counter() - started

    def release_originals(self) -> int:
        """Free weights that every graph built so far reads in packed form; returns bytes."""
        return self._table.release_packed_originals(self._bound_names)

    def _obtain(
        self, spec: GraphSpec, inputs: Mapping[str, Tensor], metadata: LayerMetadata | None
    ) -> tuple[Program, Result]:
        if self._store is None:
            return self._capture(spec, inputs, metadata), "compiled"
        key = self.key(spec)
        # Of several processes that need a graph, one compiles and the others wait and load.
        with self._store.lock(key):
            stored = self._load(self._store, key)
            if stored is not None:
                return stored, "loaded"
            program = self._capture(spec, inputs, metadata)
            _save(self._store, key, spec, program)
        return program, "compiled"

    def _load(self, store: ArtifactStore, key: CacheKey) -> Program | None:
        files = store.load(key)
        if files is None:
            return None
        try:
            program = Program.from_bytes(files[PROGRAM_FILE])
            self._table.check_names(program.bindings)
        except (CorruptArtifactError, CompileError, KeyError) as error:
            # The files are intact but do not make a program for this model: rebuild them.
            store.quarantine(key, str(error))
            return None
        return program

    def _capture(
        self, spec: GraphSpec, inputs: Mapping[str, Tensor], metadata: LayerMetadata | None
    ) -> Program:
        function, names = graph_function(spec.phase, self._model)
        args = tuple(inputs[name] for name in names)
        with self._forward_context(metadata):
            return self._compiler.lower(capture(function, args, self._table, inputs))


def _save(store: ArtifactStore, key: CacheKey, spec: GraphSpec, program: Program) -> None:
    try:
        data = program.to_bytes()
    except CompileError as error:
        logger.warning("Graph %s runs but cannot be cached: %s", spec, error)
        return
    store.store(key, {PROGRAM_FILE: data})
