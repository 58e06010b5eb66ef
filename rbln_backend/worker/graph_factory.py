"""Compiled graphs from the artifact store, or captured where the store lacks them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger

from rbln_backend.config import RblnConfig
from rbln_backend.core import GraphSpec
from rbln_backend.devices.emulated.kernel_set import coded
from rbln_backend.devices.emulated.packing import pack, pack_consuming
from rbln_backend.devices.port import CompiledGraph, Compiler
from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.graphs.cache import BINARIES, PROGRAM, ArtifactStore, CacheKey
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.model_fields import model_fields, without_provenance
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import ADAPTERS, KV, TensorTable
from rbln_backend.kv_cache.tensors import KvCaches
from rbln_backend.layers.attention import RblnAttentionMetadata
from rbln_backend.layers.encoder import EncoderAttentionImpl
from rbln_backend.models import missing_in
from rbln_backend.speculation.text_drafts import get_draft_model
from rbln_backend.worker.draft_model import has_own_embedding
from rbln_backend.worker.graph_functions import WHOLE, GraphFunction, ModelPart, graph_function
from rbln_backend.worker.inputs import KvGroup

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters

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


class GraphListener:
    """Receives the progress of a warm-up; this one ignores it."""

    def graph_started(self, spec: GraphSpec) -> None:
        """Called when the capture or load of a graph begins."""

    def graph_done(self, spec: GraphSpec, result: Result, seconds: float) -> None:
        """Called when a graph was captured or loaded."""


def graph_key(
    fields: Mapping[str, Any], fingerprint: Mapping[str, Any], spec: GraphSpec
) -> CacheKey:
    """Return the key of a graph; ``fields`` are those that all graphs of an engine share."""
    graph: dict[str, Any] = {
        "device": dict(fingerprint),
        "phase": spec.phase_name,
        "bucket": spec.bucket,
    }
    sizes = {"length": spec.length, "prompts": spec.prompts}
    return CacheKey({**fields, **graph, **{name: n for name, n in sizes.items() if n > 1}})


def binaries_key(
    fields: Mapping[str, Any], fingerprint: Mapping[str, Any], specs: Iterable[GraphSpec]
) -> CacheKey:
    """Return the key of the binaries that a device's compiler made of an engine's graphs."""
    names: list[Any] = sorted(map(str, specs))
    graphs: dict[str, Any] = {"device": dict(fingerprint), "phase": "binaries", "graphs": names}
    return CacheKey({**fields, **graphs})


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
        self.compiles_when_loading = compiler.capabilities.stores_binaries

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
            program = self._load(request)
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
        with ExitStack() as stack:
            for request in requests:
                lock = locks[request.spec] = stack.enter_context(ExitStack())
                lock.enter_context(self._lock(request.spec))
                started = time.perf_counter()
                program = self._load(request)
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
        self._compiler.check(program, self._table.get_shapes(program.bindings, request.inputs))

    def _load(self, request: GraphRequest) -> Program | None:
        if self._store is None:
            return None
        key = self.key(request.spec)
        files = self._store.load(key)
        if files is None:
            return None
        try:
            program = Program.from_bytes(files[PROGRAM])
            self._check(program, request)
        except (CorruptArtifactError, CompileError, KeyError) as error:
            # The files are intact but do not make a program for this model: rebuild them.
            self._store.quarantine(key.digest, str(error))
            return None
        return program

    def _capture(self, request: GraphRequest) -> Program:
        function_and_names = graph_function(request.spec.phase, self._model, self._part)
        return self._capture_function(request, *function_and_names)

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
            request.spec,
            lowering_began - began,
            time.perf_counter() - lowering_began,
        )
        return lowered


# Graphs captured in forked children, one per core: Dynamo is Python and uses one core.
#
# A child inherits the loaded model, sends programs as bytes and exits without the parent's exit
# handlers. If a child dies, the parent lacks the graphs that it did not send.


_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 120.0
_LEAST_WORK = 0.01
"""Processor seconds per second of a child that captures, on however many shared cores."""
_INDEX = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Captured:
    """A program's bytes and the seconds of its capture."""

    spec: GraphSpec
    data: bytes
    seconds: float


def get_workers(compiler: Compiler, local_ranks: int) -> int:
    """Return a rank's share of the cores, 1 for the SDK: its compiler may not survive a fork."""
    if not compiler.capabilities.runs_on_host:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def capture_in_children(
    specs: Sequence[GraphSpec],
    capture: Callable[[GraphSpec], bytes],
    *,
    workers: int,
    on_start: Callable[[GraphSpec], None],
    timeout_s: float = _TIMEOUT_S,
) -> Generator[Captured, None, None]:
    """Capture ``specs`` in ``workers`` forked children and yield each when done.

    A graph is left out if its capture fails, if its child dies, or if its child neither sends
    anything nor computes for ``timeout_s`` seconds; nothing is raised.
    """
    # Each child takes the next number out of a pipe when it is idle, until its end of file.
    queue, numbers = os.pipe()
    os.write(numbers, b"".join(_INDEX.pack(index) for index in range(len(specs))))
    os.close(numbers)
    children: dict[Connection, int] = {}
    try:
        for _ in range(min(workers, len(specs))):
            reader, writer = Pipe(duplex=False)
            children[reader] = _fork(partial(_work, queue, specs, writer, capture))
            writer.close()
        yield from _collect(children, specs, on_start, timeout_s)
    finally:
        os.close(queue)
        for reader, pid in children.items():
            reader.close()
            _end(pid)


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # No signal handler and no exit hook of the parent may run here.
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        work()
    except BaseException:
        logger.exception("A graph is captured again by the engine process")
    finally:
        os._exit(0)


def _work(
    queue: int,
    specs: Sequence[GraphSpec],
    writer: Connection,
    capture: Callable[[GraphSpec], bytes],
) -> None:
    while record := os.read(queue, _INDEX.size):
        (index,) = _INDEX.unpack(record)
        writer.send((index, 0.0, None))
        started = time.perf_counter()
        data = capture(specs[index])
        writer.send((index, time.perf_counter() - started, data))


def _collect(
    children: Mapping[Connection, int],
    specs: Sequence[GraphSpec],
    on_start: Callable[[GraphSpec], None],
    timeout_s: float,
) -> Iterator[Captured]:
    # When each child was last known to work, and its processor time then.
    worked = {reader: (time.monotonic(), _cpu_s(pid)) for reader, pid in children.items()}
    while worked:
        first = min(at for at, _ in worked.values())
        ready = wait(list(worked), max(0.0, first + timeout_s - time.monotonic()))
        for reader in children.keys() & ready:
            try:
                index, seconds, data = reader.recv()
            except (EOFError, OSError):
                del worked[reader]
                continue
            worked[reader] = time.monotonic(), _cpu_s(children[reader])
            if data is None:
                on_start(specs[index])
            else:
                yield Captured(specs[index], data, seconds)
        for reader, (at, cpu_s) in list(worked.items()):
            waited_s = time.monotonic() - at
            if reader in ready or waited_s < timeout_s:
                continue
            now_s = _cpu_s(children[reader])
            worked[reader] = time.monotonic(), now_s
            if now_s - cpu_s < waited_s * _LEAST_WORK:
                logger.warning(
                    "A child has not computed for %.0f s: the engine captures its graph", waited_s
                )
                del worked[reader]
                os.kill(children[reader], signal.SIGKILL)


def _cpu_s(pid: int) -> float:
    """Return the processor time of a child that has not been waited for."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def named_tensors(
    model: nn.Module,
    attention_layers: Mapping[str, Any],
    kv_caches: KvCaches,
    adapters: Adapters | None,
) -> TensorTable:
    """Return the table of all tensors that graphs read beside the inputs of a step."""
    table = TensorTable(
        lambda weight: coded(pack(weight), len(weight)),
        lambda weight: coded(pack_consuming(weight), len(weight)),
    )
    table.add_model(model)
    for name, layer in attention_layers.items():
        if isinstance(layer.impl, EncoderAttentionImpl):
            continue
        table.add(f"scale:{name}", layer.impl.scale_tensor)
        if layer.impl.alibi_slopes is not None:
            table.add(f"alibi:{name}", layer.impl.alibi_slopes)
    for name, cache in kv_caches.tensors.items():
        table.add(f"{KV}{name}", cache)
    if adapters is not None:
        for name, stack in adapters.layers.tensors().items():
            table.add(f"{ADAPTERS}{name}", stack)
    return table


def cache_fields(config: VllmConfig, rbln: RblnConfig, groups: Sequence[KvGroup]) -> dict[str, Any]:
    """Return the fields besides device, phase and bucket that change a graph; weights do not."""
    parallel, lora, adapters = config.parallel_config, config.lora_config, None
    if lora is not None:
        targets = None if lora.target_modules is None else sorted(lora.target_modules)
        adapters = {"slots": lora.max_loras, "rank": lora.max_lora_rank, "targets": targets}
    # The draft model and the number of its drafts.
    drafts: dict[str, Any] = {}
    speculation = get_draft_model(config)
    if speculation is not None:
        draft = speculation.draft_model_config
        described = json.loads(json.dumps(draft.hf_config.to_dict(), default=str))
        fields = {"class": draft.architecture, "drafts": speculation.num_speculative_tokens}
        if has_own_embedding(config):
            fields["embedding"] = "own"
        drafts = {"draft": {**without_provenance(described), **fields}}
    return {
        **model_fields(config, rbln),
        "kv_groups": [dataclasses.asdict(group) for group in groups],
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "data": parallel.data_parallel_size,
            "expert": parallel.enable_expert_parallel,
            "rank": parallel.rank,
            # Ranks may hold different numbers of experts, and an NPU's binaries are of one rank.
            "data_rank": parallel.data_parallel_rank,
        },
        "lora": adapters,
        "masks_tokens": bool(missing_in(config.model_config)),
        **drafts,
    }
