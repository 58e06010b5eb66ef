"""Description of each worker for `/v1/server_info`: device, memory, model and cache.

A rank updates `<run_dir>/describe-<rank>.json` during its start; the file remains when the rank
dies. Invariants (tests/unit/reporting/test_description.py): a change is atomic for readers; a
failed write never stops a start-up; nothing is written once the rank is ready. The fields are an
interface of consoles and scripts: docs/server_info.md.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Section:
    """Base of the sections of a description that are objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo(Section):
    """Device of the graphs."""

    name: Annotated[str, "`emulated` or `rebel`."]
    npu: Annotated[str | None, "The NPU that graphs are compiled for; null when emulated."]
    kernels: Annotated[str | None, "`native` or `aten` on the emulated device."]
    isa: Annotated[str | None, "Instruction set that the kernels chose, such as `avx2`."]
    library: Annotated[str | None, "Path of the kernels' library."]
    reason: Annotated[str, "How the kernels were obtained, or why they are not the native ones."]


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
