"""The reports of `rbln-serve check` and `cache verify`: model, memory, graphs and the store."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from rbln_backend.config import RblnConfig
from rbln_backend.core import Phase
from rbln_backend.devices.emulated.build import LEVELS, build_key, can_build, cpu_name
from rbln_backend.devices.emulated.compiler import EmulatedCompiler
from rbln_backend.devices.emulated.kernel_set import find_built, kernel_stores, why_refused
from rbln_backend.devices.port import Capabilities
from rbln_backend.devices.rebel.compiler import make_rebel_compiler
from rbln_backend.errors import ConfigError, CorruptArtifactError
from rbln_backend.graphs.cache import ArtifactStore, CacheKey, Entry, StoreEvent, diff, graph_store
from rbln_backend.graphs.kernel_files import kernel_store, libraries
from rbln_backend.graphs.model_fields import version_fields
from rbln_backend.layers.attention import RblnAttentionBackend
from rbln_backend.reports.info import (
    Difference,
    GraphState,
    KernelReport,
    ModelReport,
    PlannedGraph,
    StoreReport,
)
from rbln_backend.speculation.text_drafts import get_draft_model
from rbln_backend.worker.graph_factory import binaries_key, cache_fields, graph_key
from rbln_backend.worker.inputs import kv_groups
from rbln_backend.worker.memory import memory_report
from rbln_backend.worker.preflight import (
    Preflight,
    cache_groups,
    generates,
    prefix_caching,
    prepare,
    quantized_summary,
    sampler_graphs,
)
from rbln_backend.worker.stored_graphs import check_graph


def inspect_model(config: VllmConfig) -> ModelReport:
    """Return the report on a model, its memory and its stored graphs; raises like ``prepare``."""
    preflight = prepare(config)
    model, tables = config.model_config, preflight.tables
    caching, reason = prefix_caching(config, preflight.rbln, preflight.specs)
    lora = config.lora_config
    follows = model.original_max_model_len != -1
    draft = get_draft_model(config)
    return ModelReport(
        architecture=model.architecture,
        task="generates text" if generates(config) else "pools",
        device=preflight.capabilities.device,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        quantized_layers=quantized_summary(preflight.skeleton.model),
        num_parameters=preflight.skeleton.num_parameters,
        weight_bytes=preflight.skeleton.weight_bytes,
        kv_groups=cache_groups(preflight.specs),
        max_model_len=model.max_model_len,
        block_size=config.cache_config.block_size,
        prefill_chunks=next(iter(tables.values())).sizes,
        decode_buckets=tables[Phase.DECODE].sizes if Phase.DECODE in tables else (),
        num_graphs=len(preflight.graphs),
        num_sampler_graphs=len(sampler_graphs(config, preflight.graphs)),
        prefix_caching=caching,
        prefix_caching_reason=reason,
        verify_sizes=tuple(f"{requests}x{tokens}" for requests, tokens in preflight.verify),
        draft_model=f"{draft.method}, {draft.draft_model_config.model}" if draft else "",
        max_loras=lora.max_loras if lora else 0,
        max_lora_rank=lora.max_lora_rank if lora else 0,
        lacking=preflight.lacking,
        memory=memory_report(preflight),
        # With --max-model-len auto the graphs depend on the memory of the serving host.
        store=survey(preflight) if follows and knows_ranks(config) else None,
    )


# More than any host has: vLLM's grouping of layers needs a number but does not depend on it.
_ANY_BYTES = 1 << 50
_LONGEST_LINE = 160
# Fields whose values mean nothing to users.
_OPAQUE = {"backend_sources": "backend_sources: another version of rbln-serve made it"}


def survey_store(config: VllmConfig, cache_root: str) -> StoreReport:
    """Compare the graphs that a start needs with those below ``cache_root``, an absolute path.

    Raises like ``prepare``.
    """
    check_length(config)
    if not knows_ranks(config):
        raise ConfigError(
            "the graphs of pipeline stages and of data-parallel experts are not known before their "
            "ranks run; `rbln-serve compile` with the same flags fills the store and says what it "
            "found there"
        )
    preflight = prepare(config)
    rbln = preflight.rbln.model_copy(update={"cache_root": cache_root})
    return survey(replace(preflight, rbln=rbln))


def survey(preflight: Preflight) -> StoreReport:
    """Compare as ``survey_store`` for a model that is prepared already."""
    rbln, keys = preflight.rbln, planned_keys(preflight)
    events: list[StoreEvent] = []
    store = ArtifactStore(
        graph_store(Path(rbln.cache_root)),
        max_bytes=rbln.cache_max_bytes,
        read_only=True,
        bundles=[graph_store(Path(bundle)) for bundle in rbln.cache_bundles],
        on_event=events.append,
    )
    states: dict[str, GraphState] = {}
    for name, key in keys.items():
        files = store.load(key)
        if files is None:
            states[name] = "damaged" if events[-1].kind == "corrupt" else "missing"
            continue
        try:
            check_graph(key, files)
            states[name] = "stored"
        except CorruptArtifactError:
            states[name] = "damaged"
    graphs = tuple(PlannedGraph(name, key.digest, states[name]) for name, key in keys.items())
    missing = {name: key for name, key in keys.items() if states[name] != "stored"}
    return StoreReport(
        cache_root=rbln.cache_root,
        graphs=graphs,
        differences=differences(missing, store.entries()) if missing else (),
        kernels=kernel_report(rbln, preflight.capabilities),
    )


def knows_ranks(config: VllmConfig) -> bool:
    """Return True if the graphs of all ranks follow from the layers of the whole model.

    A pipeline stage has only some layers, a rank of data-parallel experts some of the experts.
    """
    parallel = config.parallel_config
    experts = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    return parallel.pipeline_parallel_size == 1 and not experts


def planned_keys(preflight: Preflight) -> dict[str, CacheKey]:
    """Return the key of every graph of every rank by its name, as the engine computes it."""
    config, rbln, keys = copy.copy(preflight.config), preflight.rbln, dict[str, CacheKey]()
    config.parallel_config = copy.copy(config.parallel_config)
    ranks = config.parallel_config.tensor_parallel_size
    # Of the compiler that an engine would make, found without loading kernels.
    if not preflight.capabilities.runs_on_host:
        fingerprint = make_rebel_compiler(rbln, None).fingerprint()
    else:
        stores = kernel_stores(rbln.cache_root, rbln.cache_bundles)
        native = rbln.kernels != "aten" and (find_built(stores) is not None or can_build())
        fingerprint = EmulatedCompiler("native" if native else "aten").fingerprint()
    for rank in range(ranks):
        config.parallel_config.rank = rank
        specs, groups = dict(preflight.specs), []
        if specs:
            (kv_config, *_) = kv_cache_configs(config, [specs], [_ANY_BYTES])
            sharing = preflight.skeleton.sharing_layers()
            groups = kv_groups(kv_config, config.model_config.max_model_len, sharing)
        fields = cache_fields(config, rbln, groups)
        of_rank = "" if ranks == 1 else f" of rank {rank}"
        for spec in preflight.graphs:
            keys[f"{spec}{of_rank}"] = graph_key(fields, fingerprint, spec)
        if preflight.capabilities.stores_binaries:
            keys[f"binaries{of_rank}"] = binaries_key(fields, fingerprint, preflight.graphs)
    return keys


def store_versions() -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the key fields of this version's graphs, and the keys of its kernel libraries."""
    return dict(version_fields()), _kernel_keys()


def _kernel_keys() -> tuple[str, ...]:
    """Return the keys of kernel libraries, this host's first."""
    return (build_key(), *(build_key(level) for level in LEVELS))


def kernel_report(rbln: RblnConfig, capabilities: Capabilities) -> KernelReport:
    """Return the state of this CPU's kernel library, and the targets of the stored libraries."""
    if not capabilities.runs_on_host:
        return KernelReport("not needed", "the device is an NPU")
    if rbln.kernels == "aten":
        return KernelReport("not needed", "PyTorch's operators are configured")
    store = kernel_store(Path(rbln.cache_root))
    targets = tuple(sorted({library.target or "unknown" for library in libraries(store)}))
    keys = _kernel_keys()
    stores = kernel_stores(rbln.cache_root, rbln.cache_bundles)
    ready = find_built(stores)
    refused = "".join(f"; {why}" for why in [why_refused(stores)] if why)
    if ready is not None:
        return KernelReport("stored", f"{ready[0].name}, {ready[1]}{refused}", keys, targets)
    has = f"; the store has some for {', '.join(targets)}" if targets else ""
    level = next((level.name for level in LEVELS if level.runs_here()), "none")
    why = f"none for this CPU ({cpu_name()}, level {level}) and version{has}{refused}"
    if not can_build():
        return KernelReport("impossible", f"{why}; there is no g++ to build them", keys, targets)
    return KernelReport("missing", f"{why}; a start builds them (a minute or so)", keys, targets)


def differences(
    missing: Mapping[str, CacheKey], entries: Sequence[Entry]
) -> tuple[Difference, ...]:
    """Return the differences of the nearest stored entries to missing graphs: stored -> needed."""
    graphs_by_difference: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, key in missing.items():
        alike = [
            entry.key
            for entry in entries
            if all(entry.key.fields.get(x) == key.fields.get(x) for x in ("phase", "architecture"))
        ]
        different = [diff(stored, key) for stored in alike if stored != key]
        nearest = min(different, key=lambda lines: (len(lines), lines), default=[])
        lines = tuple(
            _OPAQUE.get(line.partition(":")[0])
            or (line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}...")
            for line in nearest
        )
        if lines:
            graphs_by_difference[lines].append(name)
    return tuple(Difference(tuple(graphs), lines) for lines, graphs in graphs_by_difference.items())


def kv_cache_configs(
    config: VllmConfig, specs: Sequence[Mapping[str, KVCacheSpec]], available: Sequence[int]
) -> list[KVCacheConfig]:
    """Return the KV cache groups of every rank, formed from ``specs`` by rank as vLLM does."""
    register_all_kvcache_specs(config)
    # vLLM's engine resolves it before it forms groups; our caches do not use it.
    layouts = [layout.name for layout in get_supported_kv_cache_layouts([RblnAttentionBackend])]
    resolve_kv_cache_layout(config, [layouts], [s for rank in specs for s in rank.values()])
    configs: Any = get_kv_cache_configs(config, [dict(spec) for spec in specs], list(available))
    return list(configs)


def check_length(config: VllmConfig) -> None:
    """Raise ``ConfigError`` if the graphs would depend on the memory of the host."""
    if config.model_config.original_max_model_len == -1:
        raise ConfigError(
            "--max-model-len auto takes what fits into the memory of the host that serves; name a "
            "length, so that graphs made here are the ones needed there"
        )
