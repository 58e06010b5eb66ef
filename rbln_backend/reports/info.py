"""What `/v1/server_info`, `check` and `compile` report; plain data, no torch, no vLLM.

A rank updates `<run_dir>/describe-<rank>.json` during its start; the file remains when the rank
dies. Invariants (tests/unit/test_progress.py): a change is atomic for readers; a
failed write never stops a start-up; nothing is written once the rank is ready. The fields are an
interface of consoles and scripts: docs/server_info.md.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Section:
    """Base of the sections of a description that are objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo(Section):
    """Device of the graphs."""

    name: Annotated[str, "`emulated` or `rebel`."]
    npu: Annotated[str | None, "The NPU that graphs are compiled for; null when emulated."] = None
    kernels: Annotated[str | None, "`native` or `aten` on the emulated device."] = None
    isa: Annotated[str | None, "Instruction set that the kernels chose, such as `avx2`."] = None
    library: Annotated[str | None, "Path of the kernels' library."] = None
    reason: Annotated[
        str, "How the kernels were obtained, or why they are not the native ones."
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInfo(Section):
    """Threads and memory of the emulated device."""

    threads: Annotated[int, "Threads of the kernels, the engine's own included."]
    cores: Annotated[list[int], "One processor number of each core that the rank may use."]
    cpu_quota: Annotated[float | None, "Processors' worth of time that cgroups allow; null: all."]
    allocator: Annotated[str, "`mapped`: large tensors in reused memory mappings; else `system`."]
    allocator_reason: Annotated[str, "Why it is not `mapped`."]
    huge_pages: Annotated[str, "`advised` or `off`."]
    huge_pages_reason: Annotated[str, "Huge page mode of the system, or why they are off."]
    huge_page_bytes: Annotated[
        int | None, "Bytes on huge pages when the rank became ready; weights may follow."
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelInfo(Section):
    """The served model."""

    name: Annotated[str, "Folder or repository that the model was loaded from."]
    architecture: Annotated[str, "vLLM's model class."]
    runner: Annotated[str, "`generate` or `pooling`."]
    dtype: Annotated[str, "Data type of the computation."]
    quantization: Annotated[
        str | None, "Format of quantised weights, such as `compressed-tensors`; null: none are."
    ]
    quantized_layers: Annotated[
        str | None, "Which and how many layers are quantised; null until loaded."
    ]
    weight_bytes: Annotated[int | None, "Bytes of the weights of the rank; null until loaded."]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsInfo(Section):
    """Limits of the engine."""

    max_model_len: Annotated[int, "Largest number of tokens of a prompt and its answer."]
    max_num_seqs: Annotated[int, "Largest number of requests that decode together."]
    max_num_batched_tokens: Annotated[int, "Largest number of tokens of a prefill chunk."]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketsInfo(Section):
    """Sizes of the compiled graphs."""

    decode: Annotated[list[int], "Requests of a decode step; none for a model that pools."]
    prefill: Annotated[list[int], "Tokens of a chunk."]
    usage_file: Annotated[
        str | None, "File with counts of steps by size, across restarts; null: none."
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroupInfo:
    """The KV cache of layers that share a block table."""

    kind: Annotated[str, "`paged`: the whole context; `window`: the last tokens of it."]
    layers: Annotated[int, "Layers of the group."]
    block_size: Annotated[int, "Tokens of a block; of a window, its length."]
    blocks: Annotated[int, "Blocks, the one for padding included."]
    dtype: Annotated[str, "Data type of stored keys and values."]
    log_pages: Annotated[int, "Pages of the prefix log of a window, the unused first one included."]
    log_page_tokens: Annotated[int, "Tokens of such a page."]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvInfo(Section):
    """The KV cache."""

    bytes: Annotated[int, "Bytes of all groups."]
    groups: Annotated[list[KvGroupInfo], "The groups; none for a model without a cache."]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferInfo(Section):
    """Exchange of prompts' KV with other servers; null without `NixlConnector`."""

    connector: Annotated[str, "Its name, as in `--kv-transfer-config`."]
    role: Annotated[str, "`kv_producer`, `kv_consumer` or `kv_both`."]
    host: Annotated[str, "Address of the handshake's listener."]
    port: Annotated[int, "Port of it."]
    backends: Annotated[list[str], "NIXL's backends."]
    lease_s: Annotated[int, "Seconds for which the blocks of a prompt are kept."]
    load_failure_policy: Annotated[str, "`fail` or `recompute`."]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraInfo(Section):
    """Room for LoRA adapters; null without `--enable-lora`."""

    max_loras: Annotated[int, "Slots: adapters that can be loaded at once."]
    max_lora_rank: Annotated[int, "Largest rank of an adapter."]
    bytes: Annotated[int, "Bytes of all slots, filled or not."]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelInfo(Section):
    """The draft model; null without one."""

    name: Annotated[str, "Folder or repository that it was loaded from."]
    method: Annotated[str, "vLLM's name of the method, such as `medusa`."]
    drafts: Annotated[int, "Drafts of a request in a step, at most."]
    weight_bytes: Annotated[int, "Bytes of its weights, which `model.weight_bytes` contains."]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsInfo(Section):
    """Computation of mixtures of experts; null for a model without them."""

    path: Annotated[str, "`opt`, `custom`, `glu` (the SDK's op) or `native`."]
    reason: Annotated[str, "Reason of the choice."]
    tokens_mask: Annotated[bool, "Whether padded rows are excluded from choosing experts."]
    layers: Annotated[int, "Layers with experts."]
    experts: Annotated[int, "Experts of a layer, on all ranks."]
    local: Annotated[int, "Experts of a layer that this rank holds."]
    ranks: Annotated[int, "Ranks that share the experts; 1: each rank has all."]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo(Section):
    """The store of compiled graphs at start-up."""

    root: Annotated[str, "Its directory."]
    enabled: Annotated[bool, "Whether it is used."]
    read_only: Annotated[bool, "Whether it is never written."]
    max_bytes: Annotated[int, "Bound of its size."]
    hits: Annotated[int, "Graphs found in it."]
    misses: Annotated[int, "Graphs not found in it."]
    corrupt: Annotated[int, "Damaged graphs that were compiled again."]
    entries: Annotated[int, "Graphs in it, of all models."]
    bytes: Annotated[int, "Bytes of them."]


SECTIONS: Mapping[str, type[Section]] = {
    "device": DeviceInfo,
    "runtime": RuntimeInfo,
    "model": ServedModelInfo,
    "limits": LimitsInfo,
    "buckets": BucketsInfo,
    "kv": KvInfo,
    "kv_transfer": KvTransferInfo,
    "lora": LoraInfo,
    "draft_model": DraftModelInfo,
    "experts": ExpertsInfo,
    "cache": CacheInfo,
}
"""Sections of a description by name."""


class DescriptionWriter:
    """Writer of one rank's description; with `run_dir` None nothing is written."""

    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self._path = None if run_dir is None else run_dir / f"describe-{rank}.json"
        self._sections: dict[str, object] = {}

    def write(self, name: str, section: Section | Mapping[str, object]) -> None:
        """Add or replace a section; a mapping holds JSON values."""
        if isinstance(section, Mapping):
            self._sections[name] = dict(section)
        else:
            self._sections[name] = dataclasses.asdict(section)
        if self._path is None:
            return
        aside = self._path.with_suffix(".new")
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(self._sections), encoding="utf-8")
            aside.replace(self._path)
        except OSError as error:
            logger.warning("No description for other processes: %s", error)
            self._path = None


def read_descriptions(run_dir: Path) -> list[dict[str, Any]]:
    """Return the descriptions of all ranks, by rank number."""
    found: dict[int, dict[str, Any]] = {}
    for path in run_dir.glob("describe-*.json"):
        try:
            found[int(path.stem.removeprefix("describe-"))] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            logger.warning("Skipped an unreadable description: %s", path)
    return [found[rank] for rank in sorted(found)]


_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Estimated bytes by use; `source` names the limit behind `total_bytes`.

    A block holds `block_tokens` tokens of every full-attention layer in `block_bytes`.
    """

    total_bytes: int
    available_bytes: int
    source: str
    process_bytes: int
    weight_bytes: int
    packing_bytes: int
    lora_bytes: int
    workspace_bytes: int
    window_bytes: int
    block_bytes: int
    block_tokens: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    problems: tuple[str, ...] = ()

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.window_bytes

    @property
    def needed_bytes(self) -> int:
        parts = (self.process_bytes, self.weight_bytes, self.packing_bytes, self.lora_bytes)
        return sum(parts) + self.workspace_bytes + self.kv_bytes

    @property
    def longest_requests(self) -> float | None:
        """Requests of `max_model_len` tokens that the blocks hold; None without such layers."""
        if not self.block_bytes or not self.num_blocks:
            return None
        # Block 0 holds no request.
        blocks = -(-self.max_model_len // self.block_tokens)
        return (self.num_blocks - 1) / blocks

    def warnings(self) -> list[str]:
        """Return limitations that the user may not expect."""
        held = self.longest_requests
        if held is None or held >= self.max_num_seqs or self.problems:
            return []
        return [
            f"the KV cache holds {held:.1f} requests of --max-model-len {self.max_model_len}, "
            f"and --max-num-seqs is {self.max_num_seqs}: where prompts are long, requests wait or "
            "are computed again; lower one of them or give more --kv-cache-memory-bytes"
        ]

    def to_dict(self) -> dict[str, object]:
        sums = {"kv_bytes": self.kv_bytes, "needed_bytes": self.needed_bytes}
        return {**dataclasses.asdict(self), **sums, "longest_requests": self.longest_requests}

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values to print, one per line."""
        blocks = []
        if self.block_bytes:
            held = self.longest_requests
            longest = "" if held is None else f", {held:.1f} longest requests"
            total = _mib(self.num_blocks * self.block_bytes)
            size = f"{self.num_blocks} blocks of {self.block_tokens} tokens"
            size = f"{total}: {size}, {self.block_bytes:,} bytes each{longest}"
            blocks.append(("  KV blocks", size))
        return [
            (
                "memory",
                f"about {_mib(self.needed_bytes)} of {_mib(self.available_bytes)} free "
                f"({self.source}: {_mib(self.total_bytes)})",
            ),
            ("  process", _mib(self.process_bytes)),
            ("  weights", f"{_mib(self.weight_bytes)}, {_mib(self.packing_bytes)} more packed"),
            *([("  adapters", _mib(self.lora_bytes))] if self.lora_bytes else []),
            ("  workspace", _mib(self.workspace_bytes)),
            *([("  windows", _mib(self.window_bytes))] if self.window_bytes else []),
            *blocks,
        ]


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"


GraphState = Literal["stored", "missing", "damaged"]
KernelState = Literal["stored", "missing", "not needed", "impossible"]


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph that a start would load or compile, with the digest of its cache key."""

    name: str
    digest: str
    state: GraphState


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between the stored keys and those of `graphs`, one line per field."""

    graphs: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelReport:
    """State of the emulated device's kernel library on this host.

    `keys` identify all libraries of this version, this host's first; `targets` are the CPUs for
    which the store has libraries.
    """

    state: KernelState
    detail: str
    keys: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Stored and missing artifacts of a start."""

    cache_root: str
    graphs: tuple[PlannedGraph, ...]
    differences: tuple[Difference, ...]
    kernels: KernelReport

    @property
    def to_compile(self) -> tuple[str, ...]:
        return tuple(graph.name for graph in self.graphs if graph.state != "stored")

    @property
    def is_warm(self) -> bool:
        """True if a start would neither compile a graph nor build kernels."""
        return not self.to_compile and self.kernels.state in ("stored", "not needed")

    def to_dict(self) -> dict[str, object]:
        return {"warm": self.is_warm, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """Return the lines to print, the verdict first."""
        stored = len(self.graphs) - len(self.to_compile)
        verdict = "warm" if self.is_warm else "cold" if not stored else "partly cold"
        found = [
            f"{verdict}: {stored} of {len(self.graphs)} graphs are in {self.cache_root}",
            f"  kernels: {self.kernels.detail}",
        ]
        found += [f"  {graph.name}: {graph.state}" for graph in self.graphs]
        for difference in self.differences:
            found.append(f"  nearest to {', '.join(difference.graphs)} in the store, what differs:")
            found += [f"    {line}" for line in difference.lines]
        return found


@dataclass(frozen=True, slots=True)
class CompileReport:
    """Result of `rbln-serve compile`: names of graphs, with the rank if there are several."""

    cache_root: str
    compiled: tuple[str, ...]
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    kernels: tuple[str, ...]

    @classmethod
    def of_ranks(
        cls,
        cache_root: str,
        ranks: Sequence[tuple[dict[str, str], Sequence[str]]],
        kernels: Sequence[str],
    ) -> CompileReport:
        """Combine the ranks' results by graph, and their graphs that were not stored."""
        results: dict[str, str] = {}
        missing: list[str] = []
        for rank, (made, lost) in enumerate(ranks):
            prefix = f"rank {rank} " if len(ranks) > 1 else ""
            results |= {prefix + name: result for name, result in made.items()}
            missing += [prefix + name for name in lost]
        return cls(
            cache_root=cache_root,
            compiled=tuple(name for name, result in results.items() if result == "compiled"),
            loaded=tuple(name for name, result in results.items() if result == "loaded"),
            missing=tuple(missing),
            kernels=tuple(kernels),
        )

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Attention layers with equal caches; `window` in tokens, None for full attention."""

    num_layers: int
    window: int | None
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def kind(self) -> str:
        return "full attention" if self.window is None else f"sliding window of {self.window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A model as this backend runs it. Sizes are in bytes, contexts and chunks in tokens."""

    architecture: str
    task: str
    device: str
    dtype: str
    quantization: str | None
    quantized_layers: str | None
    num_parameters: int
    weight_bytes: int
    kv_groups: tuple[CacheGroup, ...]
    max_model_len: int
    block_size: int
    prefill_chunks: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    num_graphs: int
    prefix_caching: bool
    prefix_caching_reason: str
    verify_sizes: tuple[str, ...] = ()
    """Sizes of steps that check drafts: requests x tokens of each."""
    num_sampler_graphs: int = 0
    """Graphs that draw tokens, which every start compiles."""
    draft_model: str = ""
    """Method and name of the draft model; empty without one."""
    max_loras: int = 0
    max_lora_rank: int = 0
    memory: MemoryReport | None = None
    store: StoreReport | None = None
    """None if the graphs depend on the memory of the serving host."""
    lacking: str | None = None
    """The weights that the model's files lack."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why this host cannot run the model, each with a fix."""
        of_files = () if self.lacking is None else (self.lacking,)
        return of_files + (self.memory.problems if self.memory is not None else ())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Limitations that the user may not expect."""
        return tuple(self.memory.warnings()) if self.memory is not None else ()

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.kv_groups)

    def to_dict(self) -> dict[str, object]:
        groups = [dataclasses.asdict(group) | {"kind": group.kind} for group in self.kv_groups]
        return {
            **dataclasses.asdict(self),
            "num_layers": self.num_layers,
            "kv_groups": groups,
            "memory": None if self.memory is None else self.memory.to_dict(),
            "store": None if self.store is None else self.store.to_dict(),
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values to print, one per line."""
        # Packed weights are counted in words.
        counted = "parameters and words" if self.quantization else "parameters"
        weights = (
            f"{self.num_parameters / 1e6:,.1f}M {counted}, {self.dtype}, "
            f"{self.weight_bytes / 2**20:,.0f} MiB"
        )
        quantization = f"{self.quantization}: {self.quantized_layers or 'no layer'}"
        sizes, drawing = ", ".join(self.verify_sizes), self.num_sampler_graphs
        more = f", and {drawing} that draw tokens, compiled by every start" if drawing else ""
        adapters = f"{self.max_loras} slots for ranks up to {self.max_lora_rank}"
        reason = self.prefix_caching_reason
        return [
            ("architecture", f"{self.architecture} ({self.task})"),
            ("weights", weights),
            *([("quantization", quantization)] if self.quantization else []),
            *self._caches(),
            ("prefill chunks", _sizes(self.prefill_chunks)),
            ("decode buckets", _sizes(self.decode_buckets)),
            *([("draft model", self.draft_model)] if self.draft_model else []),
            *([("drafts", f"checked by steps of {sizes}")] if sizes else []),
            ("graphs", f"{self.num_graphs}{more}"),
            ("prefix caching", f"{'on' if self.prefix_caching else 'off'}: {reason}"),
            *([("adapters", adapters)] if self.max_loras else []),
            ("device", self.device),
            *(self.memory.lines() if self.memory is not None else ()),
            *self._stored(),
        ]

    def _stored(self) -> list[tuple[str, str]]:
        if self.store is None:
            return [("compile cache", "unknown: --max-model-len auto follows the host's memory")]
        verdict, *lines = self.store.lines()
        return [("compile cache", verdict), *(("", line.removeprefix("  ")) for line in lines)]

    def _caches(self) -> list[tuple[str, str]]:
        if not self.kv_groups:
            none = "none: every token sees the whole prompt, which is one run"
            return [("KV cache", none), ("context", f"{self.max_model_len} tokens")]
        return [
            ("layers", str(self.num_layers)),
            *(("KV cache", self._group(group)) for group in self.kv_groups),
            ("context", f"{self.max_model_len} tokens in blocks of {self.block_size}"),
        ]

    def _group(self, group: CacheGroup) -> str:
        layers = "1 layer" if group.num_layers == 1 else f"{group.num_layers} layers"
        heads = f"{group.num_kv_heads} KV heads of {group.head_size}"
        stored = "" if group.dtype == self.dtype else f" in {group.dtype}"
        return f"{layers}, {group.kind}, {heads}{stored}"


def _sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) or "none"
