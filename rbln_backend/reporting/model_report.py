"""Report of `rbln-serve check` on a model that can run; plain data, no torch, no vLLM."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rbln_backend.reporting.memory_report import MemoryReport
from rbln_backend.reporting.store_report import StoreReport


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
        """Kind of cache for display."""
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
        """Number of attention layers; each has a KV cache."""
        return sum(group.num_layers for group in self.kv_groups)

    def to_dict(self) -> dict[str, object]:
        """Return all fields as JSON values."""
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
        return [
            ("architecture", f"{self.architecture} ({self.task})"),
            ("weights", self._weights()),
            *self._quantization(),
            *self._caches(),
            ("prefill chunks", _sizes(self.prefill_chunks)),
            ("decode buckets", _sizes(self.decode_buckets)),
            *self._drafts(),
            ("graphs", self._graphs()),
            ("prefix caching", self._prefix_caching()),
            *self._adapters(),
            ("device", self.device),
            *(self.memory.lines() if self.memory is not None else ()),
            *self._stored(),
        ]

    def _graphs(self) -> str:
        drawing = self.num_sampler_graphs
        more = f", and {drawing} that draw tokens, compiled by every start" if drawing else ""
        return f"{self.num_graphs}{more}"

    def _drafts(self) -> list[tuple[str, str]]:
        sizes = ", ".join(self.verify_sizes)
        made = [("draft model", self.draft_model)] if self.draft_model else []
        return [*made, ("drafts", f"checked by steps of {sizes}")] if sizes else made

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

    def _adapters(self) -> list[tuple[str, str]]:
        if not self.max_loras:
            return []
        return [("adapters", f"{self.max_loras} slots for ranks up to {self.max_lora_rank}")]

    def _weights(self) -> str:
        # Packed weights are counted in words.
        counted = "parameters and words" if self.quantization else "parameters"
        return (
            f"{self.num_parameters / 1e6:,.1f}M {counted}, {self.dtype}, "
            f"{self.weight_bytes / 2**20:,.0f} MiB"
        )

    def _quantization(self) -> list[tuple[str, str]]:
        if not self.quantization:
            return []
        return [("quantization", f"{self.quantization}: {self.quantized_layers or 'no layer'}")]

    def _group(self, group: CacheGroup) -> str:
        layers = "1 layer" if group.num_layers == 1 else f"{group.num_layers} layers"
        heads = f"{group.num_kv_heads} KV heads of {group.head_size}"
        stored = "" if group.dtype == self.dtype else f" in {group.dtype}"
        return f"{layers}, {group.kind}, {heads}{stored}"

    def _prefix_caching(self) -> str:
        return f"{'on' if self.prefix_caching else 'off'}: {self.prefix_caching_reason}"


def _sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) or "none"
