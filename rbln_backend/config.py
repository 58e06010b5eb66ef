"""`RblnConfig`: every setting of the backend, validated once and then frozen.

It knows nothing of the environment: `rbln_backend.envs` resolves documented variable names
into it, and workers receive it through `VllmConfig.additional_config`. Defaults live here
and nowhere else. The metadata of each field feeds `docs/configuration.md`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rbln_backend.config_values import (
    CHECKS,
    Allocator,
    Count,
    Device,
    HotPathPolicy,
    HugePages,
    Kernels,
    Processors,
)
from rbln_backend.errors import ConfigError

QUEUE_TIMEOUT = "queue_timeout"
"""The stop reason of a request that waited for longer than `max_queue_ms`."""

_GIB = 1024**3


def _about(doc: str, *, graph: bool = False) -> dict[str, object]:
    """Describe one field; `graph` says that it changes what a compiled graph contains."""
    return {"doc": doc, "graph": graph}


@dataclass(frozen=True, slots=True, kw_only=True)
class RblnConfig:
    """The backend's settings. Raises `ConfigError` for a value that is not allowed."""

    device: Device = field(
        default="auto",
        metadata=_about(
            "Device to run on; `auto` takes an NPU when the RBLN SDK finds one, else `emulated`."
        ),
    )
    kernels: Kernels = field(
        default="auto",
        metadata=_about(
            "Emulated device: `native` fails without a compiler, `aten` never builds kernels."
        ),
    )
    strict_mode: bool = field(
        default=False,
        metadata=_about("A compile failure raises instead of falling back to the CPU.", graph=True),
    )
    enable_warm_up: bool = field(
        default=True,
        metadata=_about("Compile or load and run every planned graph before the service is ready."),
    )
    hot_path_policy: HotPathPolicy = field(
        default="error",
        metadata=_about("What a shape without a compiled graph does after warm-up."),
    )
    decode_batch_bucket_strategy: str = field(
        default="exponential",
        metadata=_about("How the decode buckets are derived from `max_num_seqs`."),
    )
    decode_batch_bucket_min: int = field(
        default=1, metadata=_about("Smallest decode bucket, in requests.")
    )
    decode_batch_bucket_step: int = field(
        default=2,
        metadata=_about(
            "Divisor (exponential) or difference (linear) between neighbouring buckets."
        ),
    )
    decode_batch_bucket_limit: int = field(
        default=32,
        metadata=_about("Largest number of decode buckets, counted from the largest bucket."),
    )
    decode_batch_bucket_manual_buckets: tuple[int, ...] = field(
        default=(),
        metadata=_about(
            "The decode buckets of strategy `manual`; the largest must equal `max_num_seqs`."
        ),
    )
    prefill_chunk_buckets: tuple[int, ...] | None = field(
        default=None,
        metadata=_about(
            "Prefill chunk sizes in tokens; unset derives the chunk and its halves down to 16, six "
            "sizes at most."
        ),
    )
    prefill_step_tokens: int | None = field(
        default=None,
        metadata=_about(
            "What a prefill step costs besides its tokens, in tokens: a prompt is cut into smaller "
            "chunks where padding would cost more. Unset: 16 on the emulated device; on an NPU the "
            "largest chunk, which cuts nothing."
        ),
    )
    decode_steps_per_chunk: Count = field(
        default=1,
        metadata=_about(
            "Decode steps between two prefill chunks while requests decode: 0 finishes prompts "
            "first (throughput), more keep streams smoother (time between tokens)."
        ),
    )
    cache_root: str = field(
        default="~/.cache/vllm",
        metadata=_about("Directory of the caches; artifacts lie under its `rbln/`."),
    )
    cache_max_bytes: int = field(
        default=20 * _GIB,
        metadata=_about("Size in bytes above which the least recently used artifacts are evicted."),
    )
    cache_read_only: bool = field(
        default=False, metadata=_about("Read artifacts but never write, evict or quarantine any.")
    )
    cache_bundles: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            "Folders with exported bundles, searched for what `cache_root` lacks and left as they "
            "are; kernels in them are run."
        ),
    )
    disable_compile_cache: bool = field(
        default=False, metadata=_about("Neither read nor write compiled artifacts.")
    )
    use_vllm_model: bool = field(
        default=True,
        metadata=_about(
            "Run vLLM's own model code; the optimum path (false) is not part of this backend."
        ),
    )
    sampler: bool = field(
        default=True, metadata=_about("No effect: sampling is vLLM's, on the host.")
    )
    flash_causal_attn: bool = field(
        default=True,
        metadata=_about("No effect: the op follows from whether a sequence fits in one block."),
    )
    use_custom_kernel: bool = field(
        default=False,
        metadata=_about("Use the custom-kernel variants of the attention ops.", graph=True),
    )
    enforce_model_fp32: bool = field(
        default=False,
        metadata=_about("Compute in float32 whatever the checkpoint's dtype.", graph=True),
    )
    sub_block_cache: bool = field(
        default=True,
        metadata=_about(
            "Reuse prefixes that end inside a block: its shared head is copied, not recomputed."
        ),
    )
    sub_block_size: int | None = field(
        default=None,
        metadata=_about(
            "Tokens at whose multiples a prefix can be reused; must divide the block size. Unset: "
            "16 on the emulated device, the prefill chunk on an NPU."
        ),
    )
    window_prefix_cache: bool = field(
        default=True,
        metadata=_about(
            "Keep prefix caching for models with sliding-window layers, through a log of their KV."
        ),
    )
    window_prefix_tokens: int | None = field(
        default=None,
        metadata=_about(
            "Tokens that the prefix log of a sliding window keeps; unset: four windows for each of "
            "`max_num_seqs` requests, within an eighth of the memory."
        ),
    )
    record_usage: bool = field(
        default=True,
        metadata=_about(
            "Keep how often each batch and chunk size ran, over restarts, for `rbln-serve tune`."
        ),
    )
    num_devices_per_local_rank: int = field(
        default=1, metadata=_about("NPUs that one rank splits its tensors over.", graph=True)
    )
    force_npu_name: str | None = field(
        default=None,
        metadata=_about("Compile for this NPU although the host has none, such as RBLN-CR13."),
    )
    profiler: bool = field(
        default=False, metadata=_about("Record an RBLN profile; excludes model parallelism.")
    )
    num_threads: int | None = field(
        default=None,
        metadata=_about(
            "Host threads of one rank; unset takes the cores that the affinity mask and the cgroup "
            "quota leave the process, divided among the ranks of the host."
        ),
    )
    thread_affinity: Processors = field(
        default="none",
        metadata=_about(
            "Processors that the engine keeps to, its ranks dividing them, such as `0-3,8`; `none` "
            "leaves its threads to the system, which on a shared machine was faster."
        ),
    )
    huge_pages: HugePages = field(
        default="auto",
        metadata=_about(
            "Put weights and KV caches on huge pages, where the system has them for the asking."
        ),
    )
    allocator: Allocator = field(
        default="auto",
        metadata=_about(
            "`auto` keeps the memory of a step's large tensors for the next step; `system` is "
            "torch's own."
        ),
    )
    max_queue_ms: Count = field(
        default=0,
        metadata=_about(
            "Milliseconds that a request may wait to be scheduled for the first time; 0 is any "
            "time. The HTTP server sets it to its `--max-queue-s`."
        ),
    )
    run_dir: str | None = field(
        default=None,
        metadata=_about("Directory where workers leave progress and metrics for the API process."),
    )

    def __post_init__(self) -> None:
        """Normalise spellings, then check each field and the fields against each other."""
        for option in fields(self):
            value = CHECKS[str(option.type)](option.name, getattr(self, option.name))
            object.__setattr__(self, option.name, value)
        object.__setattr__(self, "cache_root", _absolute(self.cache_root))
        object.__setattr__(self, "cache_bundles", tuple(map(_absolute, self.cache_bundles)))
        self._check_buckets()
        if not self.use_vllm_model:
            raise ConfigError(
                "use_vllm_model=False is not supported: this backend runs vLLM's own model "
                "code and has no optimum path; leave it unset or set it to true"
            )

    def _check_buckets(self) -> None:
        strategy = self.decode_batch_bucket_strategy
        if strategy == "exponential" and self.decode_batch_bucket_step <= 1:
            raise ConfigError(
                "decode_batch_bucket_step: For exponential bucketing, step must be greater "
                f"than 1, step: {self.decode_batch_bucket_step}"
            )
        if strategy == "manual" and not self.decode_batch_bucket_manual_buckets:
            raise ConfigError(
                "decode_batch_bucket_strategy='manual' needs at least one entry in "
                "decode_batch_bucket_manual_buckets "
                "(VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS): There must be at least one "
                "decode batch size in the manual buckets"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> RblnConfig:
        """Build a config from field names and JSON values; lists stand for tuples.

        Raises `ConfigError` for an unknown key, with the nearest known one, or a bad value.
        """
        known = [option.name for option in fields(cls)]
        for key in mapping:
            if key not in known:
                raise ConfigError(f"Unknown option {key!r}{did_you_mean(key, known)}")
        values: dict[str, Any] = dict(mapping)
        return cls(**values)

    def to_dict(self) -> dict[str, object]:
        """Return all fields as JSON values; `from_mapping` restores an equal config."""
        pairs = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in pairs.items()}

    def graph_fields(self) -> dict[str, object]:
        """Return the fields that change a compiled graph, for the cache key.

        `device`, `kernels` and `force_npu_name` are requests: what they resolve to belongs to
        the compiler's description of itself, so that `auto` and an explicit choice share
        artifacts. Bucket settings are absent because each graph's key holds its own shape.
        """
        values = self.to_dict()
        return {o.name: values[o.name] for o in fields(self) if o.metadata["graph"]}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an error about an unknown name."""
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known names: {', '.join(options)}"


def _absolute(path: str) -> str:
    """Expand `~` and make the path absolute: workers may run in another directory."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise ConfigError(
            f"cache_root={path!r} needs a home directory and there is none; set VLLM_CACHE_ROOT"
        ) from None
