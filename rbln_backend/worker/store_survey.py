"""What the store has of the graphs that a configuration needs, found without compiling any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rbln_backend.compiler.artifact_store import ArtifactStore, Entry, StoreEvent, graph_store
from rbln_backend.compiler.cache_key import CacheKey, diff
from rbln_backend.compiler.device import expected_fingerprint
from rbln_backend.compiler.port import GraphSpec
from rbln_backend.config import RblnConfig
from rbln_backend.emulator.build import build_key, can_build, find_built
from rbln_backend.emulator.targets import LEVELS, cpu_name
from rbln_backend.kernel_files import kernel_store, libraries
from rbln_backend.store_report import (
    Difference,
    GraphState,
    KernelReport,
    PlannedGraph,
    StoreReport,
)
from rbln_backend.vllm_compat.surface import VllmConfig
from rbln_backend.worker.cache_fields import cache_fields, version_fields
from rbln_backend.worker.graph_factory import graph_key
from rbln_backend.worker.group_inputs import kv_groups
from rbln_backend.worker.precompile import check_length, kv_cache_configs
from rbln_backend.worker.preflight import Preflight, prepare

# More than any host has: grouping layers needs some number, and does not depend on it.
_ANY_BYTES = 1 << 50
_LONGEST_LINE = 160
# Fields whose values say nothing to a reader.
_OPAQUE = {"backend_sources": "backend_sources: another version of rbln-serve made it"}


def survey_store(config: VllmConfig, cache_root: str | None = None) -> StoreReport:
    """Compare what a start needs with what is stored; raises like ``prepare``.

    ``cache_root`` is looked at instead of the configuration's.
    """
    check_length(config)
    found = prepare(config)
    if cache_root is not None:
        found = replace(found, rbln=replace(found.rbln, cache_root=cache_root))
    return survey(found)


def survey(found: Preflight) -> StoreReport:
    """The same for a model whose layers are known already."""
    rbln, keys = found.rbln, planned_keys(found)
    states = _states(rbln, keys)
    graphs = tuple(PlannedGraph(str(spec), key.digest, states[spec]) for spec, key in keys.items())
    missing = {spec: key for spec, key in keys.items() if states[spec] != "stored"}
    return StoreReport(
        cache_root=rbln.cache_root,
        graphs=graphs,
        differences=differences(missing, _open(rbln, []).entries()) if missing else (),
        kernels=kernel_report(rbln, found.device),
    )


def planned_keys(found: Preflight) -> dict[GraphSpec, CacheKey]:
    """The key of every graph, as the engine will compute it."""
    config, rbln = found.config, found.rbln
    specs, groups = dict(found.specs), []
    if specs:
        (kv_config,) = kv_cache_configs(config, [specs], [_ANY_BYTES])
        groups = kv_groups(kv_config, config.model_config.max_model_len)
    fields = cache_fields(config, rbln, groups)
    fingerprint = expected_fingerprint(rbln)
    return {spec: graph_key(fields, fingerprint, spec) for spec in found.graphs}


def store_versions() -> tuple[dict[str, object], tuple[str, ...]]:
    """What tells this version's graphs from others', and the keys of its kernel libraries."""
    return dict(version_fields()), _kernel_keys()


def _kernel_keys() -> tuple[str, ...]:
    """This host's first."""
    return (build_key(), *(build_key(level) for level in LEVELS))


def kernel_report(rbln: RblnConfig, device: str) -> KernelReport:
    """Whether the store has a library for this CPU, and which others it has."""
    if device != "emulated":
        return KernelReport("not needed", "the device is an NPU")
    if rbln.kernels == "aten":
        return KernelReport("not needed", "PyTorch's operators were asked for")
    store = kernel_store(Path(rbln.cache_root))
    targets = tuple(sorted({library.target or "unknown" for library in libraries(store)}))
    keys = _kernel_keys()
    ready = find_built([store, *(kernel_store(Path(bundle)) for bundle in rbln.cache_bundles)])
    if ready is not None:
        return KernelReport("stored", f"{ready[0].name}, {ready[1]}", keys, targets)
    has = f"; the store has some for {', '.join(targets)}" if targets else ""
    level = next((level.name for level in LEVELS if level.runs_here()), "none")
    why = f"none for this CPU ({cpu_name()}, level {level}) and version{has}"
    if not can_build():
        return KernelReport("impossible", f"{why}; there is no g++ to build them", keys, targets)
    return KernelReport("missing", f"{why}; a start builds them (a minute or so)", keys, targets)


def differences(
    missing: Mapping[GraphSpec, CacheKey], entries: Sequence[Entry]
) -> tuple[Difference, ...]:
    """How the entries nearest to the missing graphs differ from them: stored -> needed."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for spec, key in missing.items():
        lines = _nearest(key, entries)
        if lines:
            found[lines].append(str(spec))
    return tuple(Difference(tuple(graphs), lines) for lines, graphs in found.items())


def _nearest(key: CacheKey, entries: Sequence[Entry]) -> tuple[str, ...]:
    """The fewest lines that tell ``key`` from an entry of its phase and architecture."""
    same = ("phase", "architecture")
    alike = [e for e in entries if all(e.key.fields.get(f) == key.fields.get(f) for f in same)]
    told = [diff(entry.key, key) for entry in alike if entry.key != key]
    nearest = min(told, key=lambda lines: (len(lines), lines), default=[])
    return tuple(_readable(line) for line in nearest)


def _readable(line: str) -> str:
    name = line.partition(":")[0]
    if name in _OPAQUE:
        return _OPAQUE[name]
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


def _states(rbln: RblnConfig, keys: Mapping[GraphSpec, CacheKey]) -> dict[GraphSpec, GraphState]:
    events: list[StoreEvent] = []
    store = _open(rbln, events)
    found: dict[GraphSpec, GraphState] = {}
    for spec, key in keys.items():
        if store.load(key) is not None:
            found[spec] = "stored"
        else:
            found[spec] = "damaged" if events[-1].kind == "corrupt" else "missing"
    return found


def _open(rbln: RblnConfig, events: list[StoreEvent]) -> ArtifactStore:
    """The store as it lies there: looking must not change it."""
    return ArtifactStore(
        graph_store(Path(rbln.cache_root)),
        max_bytes=rbln.cache_max_bytes,
        read_only=True,
        bundles=[graph_store(Path(bundle)) for bundle in rbln.cache_bundles],
        on_event=events.append,
    )
