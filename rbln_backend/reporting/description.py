"""What each worker tells of itself for `/v1/server_info`: its device, its memory, what it loaded.

A rank keeps `<run_dir>/describe-<rank>.json` up to date while it starts, and leaves it when it
dies. Invariants (tests/unit/reporting/test_description.py): a reader sees the file before or after
a change, never half of one; failing to write never stops a start-up; nothing is written once the
rank is ready. The fields below are an interface of consoles and scripts: docs/server_info.md.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What graphs run on."""

    name: Annotated[str, "`emulated` or `rebel`."]
    npu: Annotated[str | None, "The NPU that graphs are compiled for; null when emulated."]
    kernels: Annotated[str | None, "`native` or `aten` on the emulated device."]
    isa: Annotated[str | None, "Instruction set that the kernels chose, such as `avx2`."]
    library: Annotated[str | None, "Path of the kernels' library."]
    reason: Annotated[str, "How the kernels were obtained, or why they are not the native ones."]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInfo:
    """Threads and memory of the emulated device."""

    threads: Annotated[int, "Threads of the kernels, the engine's own included."]
    cores: Annotated[list[int], "One processor number of each core that the rank may use."]
    cpu_quota: Annotated[float | None, "Processors' worth of time that cgroups allow; null: all."]
    thread_affinity: Annotated[str, "Processors that the engine is pinned to; `none`: not pinned."]
    allocator: Annotated[str, "`mapped`: large tensors in mappings that are kept; else `system`."]
    allocator_reason: Annotated[str, "Why it is not `mapped`."]
    huge_pages: Annotated[str, "`advised` or `off`."]
    huge_pages_reason: Annotated[str, "What the system says of huge pages, or why they are off."]
    huge_page_bytes: Annotated[int | None, "Bytes on huge pages when the rank became ready."]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is served."""

    name: Annotated[str, "Folder or repository that it was loaded from."]
    architecture: Annotated[str, "vLLM's class that runs it."]
    runner: Annotated[str, "`generate` or `pooling`."]
    dtype: Annotated[str, "Type that it computes in."]
    quantization: Annotated[
        str | None, "Format of quantised weights, such as `compressed-tensors`; null: none are."
    ]
    quantized_layers: Annotated[
        str | None, "Which and how many layers are quantised; null until loaded."
    ]
    weight_bytes: Annotated[int | None, "Bytes of the weights of the rank; null until loaded."]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsInfo:
    """What the engine takes at once."""

    max_model_len: Annotated[int, "Most tokens of a prompt and its answer."]
    max_num_seqs: Annotated[int, "Most requests that decode together."]
    max_num_batched_tokens: Annotated[int, "Most tokens of one prefill chunk."]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketsInfo:
    """The sizes that graphs are compiled for."""

    decode: Annotated[list[int], "Requests of a decode step; none for a model that pools."]
    prefill: Annotated[list[int], "Tokens of a chunk."]
    usage_file: Annotated[
        str | None, "File that keeps how often each size ran, over restarts; null: none is kept."
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroupInfo:
    """The KV cache of layers that share a block table."""

    kind: Annotated[str, "`paged`: the whole context; `window`: the last tokens of it."]
    layers: Annotated[int, "Layers of the group."]
    block_size: Annotated[int, "Tokens of a block; of a window, its length."]
    blocks: Annotated[int, "Blocks, the one for padding included."]
    dtype: Annotated[str, "What keys and values are kept as."]
    log_pages: Annotated[int, "Pages of the prefix log of a window, the unused first one included."]
    log_page_tokens: Annotated[int, "Tokens of such a page."]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvInfo:
    """The KV cache."""

    bytes: Annotated[int, "Bytes of all groups."]
    groups: Annotated[list[KvGroupInfo], "The groups; none for a model without a cache."]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraInfo:
    """Room for LoRA adapters; null without `--enable-lora`."""

    max_loras: Annotated[int, "Slots: adapters that can be loaded at once."]
    max_lora_rank: Annotated[int, "Largest rank of an adapter."]
    bytes: Annotated[int, "Bytes of all slots, filled or not."]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsInfo:
    """How mixtures of experts are computed; null for a model without them."""

    path: Annotated[str, "`opt`, `custom`, `glu` (the SDK's op) or `native`."]
    reason: Annotated[str, "Why it is that one."]
    tokens_mask: Annotated[bool, "Whether padded rows are kept from choosing experts."]
    layers: Annotated[int, "Layers with experts."]
    experts: Annotated[int, "Experts of a layer, on all ranks."]
    local: Annotated[int, "Experts of a layer that this rank holds."]
    ranks: Annotated[int, "Ranks that divide the experts among them; 1: each rank has all."]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """The store of compiled graphs, as the start-up found and left it."""

    root: Annotated[str, "Its directory."]
    enabled: Annotated[bool, "Whether it is used at all."]
    read_only: Annotated[bool, "Whether it is never written."]
    max_bytes: Annotated[int, "Bound of its size."]
    hits: Annotated[int, "Graphs found in it."]
    misses: Annotated[int, "Graphs not found in it."]
    corrupt: Annotated[int, "Graphs found damaged, and made anew."]
    entries: Annotated[int, "Graphs in it, of all models."]
    bytes: Annotated[int, "Bytes of them."]


SECTIONS: Mapping[str, type] = {
    "device": DeviceInfo,
    "runtime": RuntimeInfo,
    "model": ModelInfo,
    "limits": LimitsInfo,
    "buckets": BucketsInfo,
    "kv": KvInfo,
    "lora": LoraInfo,
    "experts": ExpertsInfo,
    "cache": CacheInfo,
}
"""The sections of a description that are objects of their own."""


Section: TypeAlias = (
    DeviceInfo
    | RuntimeInfo
    | ModelInfo
    | LimitsInfo
    | BucketsInfo
    | KvInfo
    | LoraInfo
    | ExpertsInfo
    | CacheInfo
)


class DescriptionWriter:
    """Keeps one rank's description; with `run_dir` None it tells nobody."""

    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self._path = None if run_dir is None else run_dir / f"describe-{rank}.json"
        self._sections: dict[str, object] = {}

    def tell(self, name: str, section: Section | Mapping[str, object]) -> None:
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
    """Return what each rank has told so far, in the order of their numbers."""
    found: dict[int, dict[str, Any]] = {}
    for path in run_dir.glob("describe-*.json"):
        try:
            found[int(path.stem.removeprefix("describe-"))] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            logger.warning("Skipped an unreadable description: %s", path)
    return [found[rank] for rank in sorted(found)]
