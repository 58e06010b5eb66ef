"""`RblnConfig`: every setting of the backend with its rule and default.

A field declares its type, which is its rule; the variable that sets it; whether it changes
compiled graphs; and the text of `docs/configuration.md`. This module does not read the environment:
`rbln_backend.settings` creates the one object of a service, and `EngineSettings` carries it in
vLLM's configuration to all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

BACKGROUND_PRIORITY = 1 << 30
"""Requests of this priority, or a lower one (in vLLM a larger number), use only spare capacity: the
scheduler's background, under any policy."""
FIRST_PRIORITY = -(1 << 30)
"""Requests of this priority, or a higher one (a smaller number), are admitted before all other
waiting requests, under any policy."""
PROMPT_PROGRESS, PROGRESS_ARGS = "prompt_progress", "prompt_progress"
QUEUE_TIMEOUT = "queue_timeout"
"""The stop reason of a request that waited for longer than `max_queue_ms`."""
NO_TOKEN, NO_TOKEN_LEFT = -1, "no_token_left"
"""What is sampled where every token is forbidden, and the stop reason of a request that gets it."""

RANKS_EXECUTOR = "rbln_backend.worker.executor.RanksExecutor"
"""The executor of several ranks on one host."""

STRICT = ConfigDict(strict=True)

GRAPH = "graph"
"""Marks a field that changes what a compiled graph contains."""

_GIB = 1024**3
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Env:
    """Documented variable that sets a field."""

    name: str


@dataclass(frozen=True, slots=True)
class Form:
    """Notation of a type's values in JSON and in a variable's text.

    `read` returns text that it cannot convert for the type's own rule to reject, or raises
    ValueError.
    """

    json: str
    text: str
    read: Callable[[str], object] = str


def _read_switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"Valid choices: {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE


def read_number(text: str) -> object:
    """Return a variable's text as a number, unchanged if it is none."""
    try:
        return int(text)
    except ValueError:
        return text


def _read_real(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _read_numbers(text: str) -> object:
    return [read_number(part) for part in text.split(",")] if text.strip() else []


def _read_paths(text: str) -> list[str]:
    return [part for part in text.split(":") if part]


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _ascending(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if len(set(sizes)) != len(sizes):
        raise ValueError("all must be unique")
    return tuple(sorted(sizes))


def _absolute(path: str) -> str:
    """Expand `~` and make the path absolute: workers may run in another directory."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise ValueError("needs a home directory and there is none; set VLLM_CACHE_ROOT") from None


_NUMBER = Form("integer > 0", "integer > 0", read_number)
_NUMBERS = Form("list of integers > 0", "comma-separated integers", _read_numbers)
_NUMBER_OF_SECONDS = Form("number", "number", _read_real)
_TEXT = Form("text", "text")
WORD = BeforeValidator(_lower)
"""Makes a choice case-insensitive."""

Switch: TypeAlias = Annotated[bool, Form("boolean", "boolean", _read_switch)]
OptionalSwitch: TypeAlias = Annotated[bool | None, Form("boolean", "boolean", _read_switch)]
Number: TypeAlias = Annotated[int, Field(gt=0), _NUMBER]
OptionalNumber: TypeAlias = Annotated[int | None, Field(gt=0), _NUMBER]
Count: TypeAlias = Annotated[int, Field(ge=0), Form("integer >= 0", "integer >= 0", read_number)]
Sizes: TypeAlias = Annotated[
    tuple[Annotated[int, Field(gt=0)], ...],
    Field(strict=False),
    AfterValidator(_ascending),
    _NUMBERS,
]
OptionalSizes: TypeAlias = Annotated[
    tuple[Annotated[int, Field(gt=0)], ...] | None,
    Field(strict=False, min_length=1),
    AfterValidator(_ascending),
    _NUMBERS,
]
Seconds: TypeAlias = Annotated[float, Field(allow_inf_nan=False), _NUMBER_OF_SECONDS]
OptionalText: TypeAlias = Annotated[str | None, Field(min_length=1), _TEXT]
Directory: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_absolute), _TEXT]
OptionalDirectory: TypeAlias = Annotated[Directory | None, _TEXT]
Directories: TypeAlias = Annotated[
    tuple[Directory, ...],
    Field(strict=False),
    Form("list of text", "directories separated by colons", _read_paths),
]
Device: TypeAlias = Annotated[Literal["auto", "emulated", "rebel"], WORD]
Kernels: TypeAlias = Annotated[Literal["auto", "native", "aten"], WORD]
HotPathPolicy: TypeAlias = Annotated[Literal["error", "warn"], WORD]
Strategy: TypeAlias = Annotated[
    Literal["exponential", "exp", "linear", "manual"],
    WORD,
    AfterValidator(lambda name: "exponential" if name == "exp" else name),
]
KvCachePages: TypeAlias = Annotated[Literal["on_demand", "reserved"], WORD]
PrefillPolicy: TypeAlias = Annotated[Literal["shortest", "fcfs"], WORD]


class RblnConfig(BaseModel):
    """The backend's settings. Raises pydantic's `ValidationError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, **STRICT)

    device: Annotated[Device, Env("VLLM_RBLN_DEVICE")] = "auto"
    """Device to run on; `auto` takes an NPU when the RBLN SDK finds one, else `emulated`."""
    kernels: Annotated[Kernels, Env("VLLM_RBLN_KERNELS")] = "auto"
    """Emulated device: `native` fails without a compiler, `aten` never builds kernels."""
    strict_mode: Annotated[Switch, Env("VLLM_RBLN_COMPILE_STRICT_MODE")] = True
    """On an NPU: what the SDK cannot compile raises instead of falling back to the CPU."""
    use_device_tensor: Annotated[OptionalSwitch, Env("VLLM_RBLN_USE_DEVICE_TENSOR")] = None
    """On an NPU: weights, KV caches and buffers are tensors of torch's device `rbln`, not the
    SDK's own. Unset: where torch-rbln is installed.
    """
    auto_port: Annotated[OptionalSwitch, Env("VLLM_RBLN_AUTO_PORT")] = None
    """On an NPU with device tensors, whose process groups are the SDK's own (`rbln-ccl`): let it
    find their ports (`RCCL_PORT_GEN=1`). Unset: on. Without device tensors groups are gloo's.
    """
    enable_warm_up: Annotated[Switch, Env("VLLM_RBLN_ENABLE_WARM_UP")] = True
    """Compile or load and run every planned graph before the service is ready."""
    hot_path_policy: Annotated[HotPathPolicy, Env("VLLM_RBLN_HOT_PATH_POLICY")] = "error"
    """Reaction to a shape without a compiled graph after warm-up."""
    decode_batch_bucket_strategy: Annotated[
        Strategy, Env("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY")
    ] = "exponential"
    """Rule that derives the decode buckets from `max_num_seqs`."""
    decode_batch_bucket_min: Annotated[Number, Env("VLLM_RBLN_DECODE_BATCH_BUCKET_MIN")] = 1
    """Smallest decode bucket, in requests."""
    decode_batch_bucket_step: Annotated[Number, Env("VLLM_RBLN_DECODE_BATCH_BUCKET_STEP")] = 2
    """Divisor (exponential) or difference (linear) between neighbouring buckets."""
    decode_batch_bucket_limit: Annotated[Number, Env("VLLM_RBLN_DECODE_BATCH_BUCKET_LIMIT")] = 32
    """Largest number of decode buckets, counted from the largest bucket."""
    decode_batch_bucket_manual_buckets: Annotated[
        Sizes, Env("VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS")
    ] = ()
    """The decode buckets of strategy `manual`; the largest must equal `max_num_seqs`."""
    prefill_chunk_buckets: Annotated[OptionalSizes, Env("VLLM_RBLN_PREFILL_CHUNK_BUCKETS")] = None
    """Prefill chunk sizes in tokens; unset derives the chunk and its halves down to 16, six sizes
    at most.
    """
    prefill_step_tokens: OptionalNumber = None
    """Fixed cost of a prefill step, in tokens: a prompt is cut into smaller chunks where padding
    would cost more. Unset: the largest chunk, so that no prompt is cut. With kernels `aten` and
    for data-parallel engines, which compute padding: 16, times experts per chosen expert for a
    mixture of experts (128 with 4 of 32).
    """
    prefill_prompts: Annotated[OptionalNumber, Env("VLLM_RBLN_PREFILL_PROMPTS")] = None
    """Largest number of prompts that share a prefill chunk; each takes 16 tokens of it or more.
    Unset: 8 on the emulated device; 1 on an NPU, for models that pool and with the custom kernels,
    which support no other number.
    """
    prefill_policy: PrefillPolicy = "shortest"
    """Order of prompts: `shortest` computes the prompt with the fewest tokens left first, up to 8
    times a prompt's tokens after its arrival; `fcfs` computes prompts one after the other, in order
    of arrival.
    """
    max_num_partial_prefills: Number = 4
    """Largest number of prompts that may be partly computed at the same time; prompts of at most a
    chunk begin beside them.
    """
    decode_steps_per_chunk: Annotated[Count, Env("VLLM_RBLN_DECODE_STEPS_PER_CHUNK")] = 1
    """Decode steps between two prefill chunks while requests decode: 0 finishes prompts first
    (throughput), more keep streams smoother (time between tokens).
    """
    verify_lengths: OptionalSizes = None
    """With speculation, the tokens per request of a decode step: its latest token and the drafts
    that are checked. The largest must be `num_speculative_tokens` + 1. Unset: powers of two up to
    it; on an NPU the largest alone.
    """
    verify_tokens: OptionalNumber = None
    """Largest number of tokens of such a step over all requests, at most a chunk; larger sizes are
    not compiled. Unset: 64; on an NPU a chunk.
    """
    cache_root: Annotated[Directory, Env("VLLM_CACHE_ROOT")] = Field(
        "~/.cache/vllm", validate_default=True
    )
    """Directory of the caches; artifacts lie under its `rbln/`."""
    cache_max_bytes: Annotated[Number, Env("VLLM_RBLN_CACHE_MAX_BYTES")] = 20 * _GIB
    """Size in bytes above which the least recently used artifacts are evicted."""
    cache_read_only: Annotated[Switch, Env("VLLM_RBLN_CACHE_READ_ONLY")] = False
    """Read artifacts but never write, evict or quarantine any."""
    cache_bundles: Annotated[Directories, Env("VLLM_RBLN_CACHE_BUNDLES")] = ()
    """Folders with exported bundles, searched for artifacts that `cache_root` lacks and never
    written; kernels in them are run.
    """
    disable_compile_cache: Annotated[Switch, Env("VLLM_DISABLE_COMPILE_CACHE")] = False
    """Neither read nor write compiled artifacts."""
    disable_mm: Annotated[Switch, Env("VLLM_RBLN_DISABLE_MM")] = False
    """Serve the text of a multimodal checkpoint: its vision tower is neither loaded nor compiled.
    `--language-model-only` is the same; without either, such a checkpoint is refused.
    """
    sampler: Annotated[Switch, GRAPH, Env("VLLM_RBLN_SAMPLER")] = True
    """On an NPU: graphs end in the SDK's `argmax`, and steps of greedy requests without processors
    or log-probabilities take its tokens; all others are sampled on the host.
    """
    sample_on_device: Switch = False
    """On an NPU with torch-rbln: graphs of the SDK draw the tokens of steps whose requests have no
    `seed` and nothing but temperature, top_k and top_p; they are compiled at each start.
    """
    use_custom_kernel: Annotated[Switch, GRAPH, Env("RBLN_USE_CUSTOM_KERNEL")] = False
    """Use the custom-kernel variants of the attention ops."""
    enforce_model_fp32: Annotated[Switch, GRAPH, Env("VLLM_RBLN_ENFORCE_MODEL_FP32")] = False
    """Compute in float32 whatever the checkpoint's dtype."""
    sub_block_cache: Annotated[Switch, Env("VLLM_RBLN_SUB_BLOCK_CACHE")] = True
    """Reuse prefixes that end inside a block: its shared head is copied, not recomputed."""
    sub_block_size: Annotated[OptionalNumber, Env("VLLM_RBLN_SUB_BLOCK_SIZE")] = None
    """Tokens at whose multiples a prefix can be reused; must divide the block size. Unset: 16 on
    the emulated device, the prefill chunk on an NPU.
    """
    window_prefix_cache: Annotated[Switch, Env("VLLM_RBLN_WINDOW_PREFIX_CACHE")] = True
    """Keep prefix caching for models with sliding-window layers, through a log of their KV, or on
    RBLN-CR13 through the pages in which they lie.
    """
    window_prefix_tokens: Annotated[OptionalNumber, Env("VLLM_RBLN_WINDOW_PREFIX_TOKENS")] = None
    """Tokens that the prefix log of a sliding window keeps; unset: four windows for each of
    `max_num_seqs` requests, within an eighth of the memory.
    """
    kv_tier_memory_bytes: Count = 0
    """Bytes of host memory that keep pages of prefixes beside the KV cache; 0: none."""
    kv_tier_folder: OptionalDirectory = None
    """Folder of files that keep pages of prefixes over restarts; servers of one host may share it.
    """
    kv_tier_folder_bytes: Number = 8 * _GIB
    """Size of that folder in bytes above which the least recently used pages are removed."""
    log_batchsize_interval: Annotated[Seconds, Env("VLLM_LOG_BATCHSIZE_INTERVAL")] = -1.0
    """Seconds between two lines of the log on how often steps of each size ran, for
    `rbln-serve tune --batchsize-log`; below 0 there is none.
    """
    moe_use_opt_kernel: Annotated[Switch, GRAPH, Env("VLLM_RBLN_MOE_USE_OPT_KERNEL")] = True
    """Experts: the op that takes router logits and chooses the experts; preferred to the others."""
    moe_custom_kernel: Annotated[Switch, GRAPH, Env("VLLM_RBLN_MOE_CUSTOM_KERNEL")] = True
    """Experts: the op that takes each row's weight of each expert; preferred to a loop of plain
    operators over all experts.
    """
    use_moe_tokens_mask: Annotated[Switch, GRAPH, Env("VLLM_RBLN_USE_MOE_TOKENS_MASK")] = True
    """Padded rows choose no expert, so that no weights are read for them."""
    use_w8a8: Annotated[Switch, GRAPH, Env("VLLM_RBLN_USE_W8A8")] = False
    """On an NPU, inputs of FP8 weights in blocks are scaled to e4m3 in groups (W8A8), too."""
    num_devices_per_local_rank: Annotated[
        Number, GRAPH, Env("VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK")
    ] = 1
    """NPUs that one rank splits its tensors over."""
    force_npu_name: Annotated[OptionalText, Env("RBLN_FORCE_NPU_NAME")] = None
    """Compile for this NPU, such as RBLN-CR13, on a host that has none."""
    profiler: Annotated[Switch, Env("RBLN_PROFILER")] = False
    """Let `POST /start_profile` and `/stop_profile`, or `LLM.start_profile()`, record a profile of
    the steps; excludes model parallelism.
    """
    num_threads: Annotated[OptionalNumber, Env("RBLN_NUM_THREADS")] = None
    """Host threads of one rank; unset takes the cores that the affinity mask and the cgroup quota
    leave the process, divided among the ranks of the host.
    """
    kv_cache_pages: KvCachePages = "on_demand"
    """When KV caches take their memory: at first use of each page, or, `reserved`, at the start, so
    that more streams never need more memory for KV. An NPU's caches are always reserved.
    """
    max_queue_ms: Count = 0
    """Longest wait of a request for its first scheduling, in milliseconds; 0 is unlimited. The HTTP
    server sets it to its `--max-queue-s`.
    """
    run_dir: OptionalText = None
    """Directory where workers leave progress and metrics for the API process."""

    @model_validator(mode="after")
    def _check(self) -> RblnConfig:
        self.check_buckets()
        return self

    def check_buckets(self) -> None:
        """Raise `PydanticCustomError` for bucket settings that exclude each other."""
        strategy, step = self.decode_batch_bucket_strategy, self.decode_batch_bucket_step
        if strategy == "exponential" and step <= 1:
            raise PydanticCustomError(
                "clash",
                "decode_batch_bucket_step: For exponential bucketing, step must be greater than 1, "
                "step: {step}",
                {"step": step, "fields": ["decode_batch_bucket_step"]},
            )
        if strategy == "manual" and not self.decode_batch_bucket_manual_buckets:
            raise PydanticCustomError(
                "clash",
                "decode_batch_bucket_strategy='manual' needs at least one entry in "
                "decode_batch_bucket_manual_buckets "
                "(VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS): There must be at least one "
                "decode batch size in the manual buckets",
                {"fields": ["decode_batch_bucket_strategy", "decode_batch_bucket_manual_buckets"]},
            )

    @property
    def has_kv_tiers(self) -> bool:
        return self.kv_tier_memory_bytes > 0 or self.kv_tier_folder is not None

    @property
    def chunk_prompts(self) -> int:
        """`prefill_prompts` as the platform settled it, else 1."""
        return self.prefill_prompts or 1

    def to_dict(self) -> dict[str, object]:
        return self.model_dump(mode="json")

    def graph_fields(self) -> dict[str, object]:
        """Return the fields that change a compiled graph, for the cache key.

        `device`, `kernels` and `force_npu_name` are absent: the compiler's fingerprint holds what
        they resolve to, so that `auto` and an explicit choice share artifacts. Bucket settings are
        absent because each graph's key holds its own shape.
        """
        fields = type(self).model_fields
        return {k: v for k, v in self.to_dict().items() if GRAPH in fields[k].metadata}
