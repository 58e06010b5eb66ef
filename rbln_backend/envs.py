"""The one table of documented variable names, and how they resolve into `RblnConfig`.

This is the only module of the backend that reads the environment. Each row maps a documented
name to a field of `RblnConfig`; no row holds a default. Rows of one field are listed in order
of precedence. `RBLN_*` names that are not listed belong to the RBLN SDK, which reads them
itself; a `VLLM_RBLN_*` name that is not listed is an error.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from rbln_backend.config import RblnConfig, did_you_mean
from rbln_backend.config_values import CHOICES
from rbln_backend.env_values import (
    Parser,
    choice,
    parse_bool,
    parse_count,
    parse_int,
    parse_kernel_mode,
    parse_paths,
    parse_text,
    sizes,
)
from rbln_backend.errors import ConfigError

_PREFIX = "VLLM_RBLN_"
_ADDITIONAL = "additional_config"


class Status(enum.Enum):
    """What this backend does with a documented name."""

    HONOURED = "honoured"
    ALIAS = "alias, deprecated"
    NO_EFFECT = "accepted, no effect"
    REFUSED = "refused unless it asks for what is done anyway"


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One documented name; `accepts` is the only value that a REFUSED name may hold."""

    name: str
    field: str | None
    parser: Parser
    status: Status
    doc: str
    accepts: object = None


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A config, where each field's value came from, and what the operator should be told."""

    config: RblnConfig
    sources: dict[str, str]
    warnings: list[str]


_BOOL = Parser("boolean", parse_bool)
_INT = Parser("integer > 0", parse_int)
_COUNT = Parser("integer >= 0", parse_count)
_TEXT = Parser("text", parse_text)
_ANY_TEXT = Parser("text, may be empty", str)
_PATHS = Parser("directories separated by colons", parse_paths)
_POLICY = choice(*CHOICES["hot_path_policy"])
_STRATEGY = choice(*CHOICES["decode_batch_bucket_strategy"])
_NUM_DEVICES = "num_devices_per_local_rank"
_OMP_THREADS = Parser("integers > 0, the first counts", lambda raw: parse_int(raw.split(",")[0]))
_TRITON = Parser("`triton`", parse_kernel_mode)
# The XDG specification takes an empty variable for an unset one.
_XDG_CACHE = Parser("directory", lambda raw: str(Path(raw) / "vllm") if raw else None)


def _row(name: str, target: str, parser: Parser, doc: str) -> EnvVar:
    return EnvVar(name, target, parser, Status.HONOURED, doc)


def _alias(name: str, target: str, parser: Parser, doc: str) -> EnvVar:
    return EnvVar(name, target, parser, Status.ALIAS, doc)


def _no_effect(name: str, parser: Parser, doc: str, target: str | None = None) -> EnvVar:
    return EnvVar(name, target, parser, Status.NO_EFFECT, doc)


_BUCKET = "VLLM_RBLN_DECODE_BATCH_BUCKET_"
_NO_MOE = "Tokens of experts are always gathered, and their sums scattered."
_NO_ALL2ALL = "Every rank is given all tokens and adds up its experts' part of them."

ENV_VARS: tuple[EnvVar, ...] = (
    _row("VLLM_RBLN_DEVICE", "device", choice(*CHOICES["device"]), "Device to run on."),
    _row("VLLM_RBLN_KERNELS", "kernels", choice(*CHOICES["kernels"]), "Kernels when emulated."),
    _row("VLLM_RBLN_COMPILE_STRICT_MODE", "strict_mode", _BOOL, "Never fall back to the CPU."),
    _row("VLLM_RBLN_ENABLE_WARM_UP", "enable_warm_up", _BOOL, "Warm up before ready."),
    _row("VLLM_RBLN_HOT_PATH_POLICY", "hot_path_policy", _POLICY, "Fail or warn after warm-up."),
    _row(f"{_BUCKET}STRATEGY", "decode_batch_bucket_strategy", _STRATEGY, "How buckets arise."),
    _row(f"{_BUCKET}MIN", "decode_batch_bucket_min", _INT, "Smallest decode bucket."),
    _row(f"{_BUCKET}STEP", "decode_batch_bucket_step", _INT, "Divisor or difference."),
    _row(f"{_BUCKET}LIMIT", "decode_batch_bucket_limit", _INT, "Number of decode buckets."),
    _row(
        f"{_BUCKET}MANUAL_BUCKETS",
        "decode_batch_bucket_manual_buckets",
        sizes("decode batch bucket manual buckets", may_be_empty=True),
        "Buckets of strategy `manual`.",
    ),
    _row(
        "VLLM_RBLN_PREFILL_CHUNK_BUCKETS",
        "prefill_chunk_buckets",
        sizes("prefill chunk buckets", may_be_empty=False),
        "Prefill chunk sizes.",
    ),
    _row("VLLM_CACHE_ROOT", "cache_root", _TEXT, "vLLM's cache directory."),
    _row("XDG_CACHE_HOME", "cache_root", _XDG_CACHE, "Its `vllm/`, as vLLM reads it."),
    _row("VLLM_RBLN_CACHE_MAX_BYTES", "cache_max_bytes", _INT, "Bound of the store."),
    _row("VLLM_RBLN_CACHE_READ_ONLY", "cache_read_only", _BOOL, "Never write the store."),
    _row("VLLM_RBLN_CACHE_BUNDLES", "cache_bundles", _PATHS, "Read-only bundles."),
    _row("VLLM_DISABLE_COMPILE_CACHE", "disable_compile_cache", _BOOL, "Bypass the store."),
    _row("RBLN_USE_CUSTOM_KERNEL", "use_custom_kernel", _BOOL, "Custom attention kernels."),
    _alias("RBLN_KERNEL_MODE", "use_custom_kernel", _TRITON, "Switch of early releases."),
    _row("VLLM_RBLN_ENFORCE_MODEL_FP32", "enforce_model_fp32", _BOOL, "Compute in float32."),
    _row("VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK", _NUM_DEVICES, _INT, "NPUs of one rank."),
    _alias("VLLM_RBLN_TP_SIZE", _NUM_DEVICES, _INT, "Name up to 0.10."),
    _row("RBLN_FORCE_NPU_NAME", "force_npu_name", _TEXT, "Compile for an absent NPU."),
    _alias("RBLN_TARGET_SOC", "force_npu_name", _TEXT, "Name up to 0.11."),
    _row("RBLN_PROFILER", "profiler", _BOOL, "Record an RBLN profile."),
    _row("RBLN_NUM_THREADS", "num_threads", _INT, "Host threads of one rank."),
    _row("OMP_NUM_THREADS", "num_threads", _OMP_THREADS, "As OpenMP programs read it."),
    EnvVar(
        "VLLM_RBLN_USE_VLLM_MODEL",
        "use_vllm_model",
        _BOOL,
        Status.REFUSED,
        "This backend runs vLLM's own model code and has no optimum path.",
        accepts=True,
    ),
    EnvVar(
        "VLLM_RBLN_COMPILE_MODEL",
        None,
        _BOOL,
        Status.REFUSED,
        "Graphs are always compiled; there is no eager path.",
        accepts=True,
    ),
    _row(
        "VLLM_RBLN_DECODE_STEPS_PER_CHUNK",
        "decode_steps_per_chunk",
        _COUNT,
        "Decode steps between two prefill chunks.",
    ),
    _row(
        "VLLM_RBLN_SUB_BLOCK_CACHE",
        "sub_block_cache",
        _BOOL,
        "Reuse prefixes that end inside a block.",
    ),
    _row(
        "VLLM_RBLN_SUB_BLOCK_SIZE",
        "sub_block_size",
        _INT,
        "Tokens at whose multiples prefixes can be reused.",
    ),
    _row(
        "VLLM_RBLN_WINDOW_PREFIX_CACHE",
        "window_prefix_cache",
        _BOOL,
        "Keep prefix caching for models with sliding windows.",
    ),
    _row(
        "VLLM_RBLN_WINDOW_PREFIX_TOKENS",
        "window_prefix_tokens",
        _INT,
        "Tokens that the prefix log of a sliding window keeps.",
    ),
    _row("VLLM_RBLN_MOE_USE_OPT_KERNEL", "moe_use_opt_kernel", _BOOL, "Experts: the op routes."),
    _row("VLLM_RBLN_MOE_CUSTOM_KERNEL", "moe_custom_kernel", _BOOL, "Experts: weights by expert."),
    _row("VLLM_RBLN_USE_MOE_TOKENS_MASK", "use_moe_tokens_mask", _BOOL, "Padding has no expert."),
    *(
        EnvVar(name, None, _BOOL, Status.REFUSED, _NO_ALL2ALL, accepts=False)
        for name in ("VLLM_RBLN_DISPATCH_ALL2ALL", "VLLM_RBLN_COMBINE_ALL2ALL")
    ),
    EnvVar(
        "VLLM_RBLN_DP_IMPL",
        None,
        choice("padded_decode", "dummy_prefill"),
        Status.REFUSED,
        "Dummy prefills do not exist here.",
        accepts="padded_decode",
    ),
    EnvVar(
        "VLLM_RBLN_COMPILE_ONLY",
        None,
        _BOOL,
        Status.REFUSED,
        "Use `rbln-serve compile`, which fills the store and ends.",
        accepts=False,
    ),
    _no_effect("VLLM_RBLN_SAMPLER", _BOOL, "Sampling is vLLM's, on the host.", target="sampler"),
    _no_effect(
        "VLLM_RBLN_FLASH_CAUSAL_ATTN",
        _BOOL,
        "The op follows from whether a sequence fits in one block.",
        target="flash_causal_attn",
    ),
    _no_effect("VLLM_RBLN_METRICS", _BOOL, "Metrics are always on, at `/metrics`."),
    _no_effect("VLLM_RBLN_METRICS_FILE", _ANY_TEXT, "Metrics are read at `/metrics`."),
    _no_effect("VLLM_RBLN_METRICS_DIR", _ANY_TEXT, "Metrics are read at `/metrics`."),
    _no_effect("VLLM_RBLN_NUMA", _BOOL, "Name processors in `thread_affinity`."),
    _no_effect("VLLM_RBLN_SORT_BATCH", _BOOL, "A row's result does not depend on its place."),
    _no_effect("VLLM_RBLN_BATCH_ATTN_OPT", _BOOL, "One attention op serves every batch."),
    _no_effect("VLLM_RBLN_AUTO_PORT", _BOOL, "Ports are vLLM's."),
    _no_effect("VLLM_RBLN_NUM_RAY_NODES", _INT, "Ray's placement decides."),
    _no_effect("VLLM_RBLN_DISABLE_MM", _BOOL, "Use vLLM's `--limit-mm-per-prompt`."),
    _no_effect("VLLM_RBLN_DISABLE_OFFLOAD", _BOOL, "Weights are never offloaded."),
    _no_effect("VLLM_RBLN_USE_DEVICE_TENSOR", _BOOL, "The device decides."),
    _no_effect("VLLM_RBLN_BACKFILL_TRACE_REQS", _ANY_TEXT, "Tracing follows vLLM's flags."),
    _no_effect("VLLM_RBLN_DP_INPUT_ALL_GATHER", _BOOL, _NO_MOE),
    _no_effect("VLLM_RBLN_LOGITS_ALL_GATHER", _BOOL, "vLLM's logits processor decides."),
    _no_effect("VLLM_RBLN_SPECIALIZE_MOE_DECODE", _BOOL, "Decode graphs are always small."),
    _no_effect("VLLM_RBLN_MOE_REDUCE_SCATTER", _BOOL, _NO_MOE),
)

OPTION_NAMES: Mapping[str, str] = {
    "use_custom_sampler": "VLLM_RBLN_SAMPLER",
    "enable_sub_block_cache": "VLLM_RBLN_SUB_BLOCK_CACHE",
    "use_batch_attn_opt": "VLLM_RBLN_BATCH_ATTN_OPT",
    "specialize_moe_decode": "VLLM_RBLN_SPECIALIZE_MOE_DECODE",
    "use_all2all_dispatch": "VLLM_RBLN_DISPATCH_ALL2ALL",
    "use_all2all_combine": "VLLM_RBLN_COMBINE_ALL2ALL",
}
"""Keys of vllm-rbln 0.12's `additional_config` that differ from our field, and their row."""

_BY_NAME: Mapping[str, EnvVar] = {var.name: var for var in ENV_VARS}
_DEFAULTS: Mapping[str, object] = {option.name: option.default for option in fields(RblnConfig)}
_IDLE = {var.field: var for var in ENV_VARS if var.status is Status.NO_EFFECT and var.field}


def resolve(
    additional: Mapping[str, object] | None, environ: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """Build the config: `additional["rbln"]` wins over the environment, that over defaults.

    `additional` is vLLM's whole `additional_config`; `environ` defaults to the process's own.
    Raises `ConfigError` for an unknown `VLLM_RBLN_*` name or option, a malformed value, or a
    request that this backend refuses, each naming the variable or option and its value.
    """
    values: dict[str, object] = {}
    sources = {option.name: "default" for option in fields(RblnConfig)}
    warnings: list[str] = []
    _read_environment(os.environ if environ is None else environ, values, sources, warnings)
    _read_additional(additional or {}, values, sources, warnings)
    try:
        config = RblnConfig.from_mapping(values)
    except ConfigError as error:
        raise ConfigError(f"{error}{_origin(str(error), sources)}") from None
    return ResolvedConfig(config, sources, warnings)


def _read_environment(
    environ: Mapping[str, str],
    values: dict[str, object],
    sources: dict[str, str],
    warnings: list[str],
) -> None:
    for name in environ:
        if name.startswith(_PREFIX) and name not in _BY_NAME:
            hint = did_you_mean(name, (known for known in _BY_NAME if known.startswith(_PREFIX)))
            raise ConfigError(f"Unknown environment variable {name}{hint}")
    for var in ENV_VARS:
        raw = environ.get(var.name)
        if raw is None:
            continue
        value = _parse(var, raw)
        if var.status is Status.NO_EFFECT and not _is_default(var.field, value):
            warnings.append(f"{var.name} has no effect: {var.doc}")
        if var.field is None or value is None:
            continue
        if var.status is Status.ALIAS:
            chosen = values.get(var.field, value)
            warnings.append(_alias_warning(var, ignored=chosen != value))
        if var.field not in values:
            values[var.field] = value
            sources[var.field] = f"environment {var.name}"


def child_environ(*, settings: bool, **more: str) -> dict[str, str]:
    """Return an environment for a process that shall not see vLLM's settings of this one.

    ``settings`` keeps those of the RBLN backend; the cache root always stays.
    """
    kept = ("VLLM_CACHE_ROOT", *((_PREFIX, "RBLN_") if settings else ()))
    foreign = ("VLLM_", "RBLN_")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(kept) or not name.startswith(foreign)
    }
    return environ | more


def _parse(var: EnvVar, raw: str) -> object:
    try:
        value = var.parser.parse(raw)
    except ValueError as error:
        raise ConfigError(f"Invalid {var.name}: {raw}, {error}") from None
    if var.status is Status.REFUSED and value != var.accepts:
        raise ConfigError(f"{var.name}={raw} is not supported: {var.doc}")
    return value


def _is_default(name: str | None, value: object) -> bool:
    """Whether nobody will miss an effect, because the value asks for what is done anyway."""
    return name is not None and _DEFAULTS[name] == value


def _alias_warning(var: EnvVar, *, ignored: bool) -> str:
    primary = next(other.name for other in ENV_VARS if other.field == var.field)
    if ignored:
        return f"{var.name} is ignored because {primary} is set"
    return f"{var.name} is deprecated, use {primary}"


def _read_additional(
    additional: Mapping[str, object],
    values: dict[str, object],
    sources: dict[str, str],
    warnings: list[str],
) -> None:
    section = additional.get("rbln", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"Invalid additional_config['rbln']: {section!r}, must be an object")
    for key, value in section.items():
        target = str(key)
        if target in OPTION_NAMES:
            var = _BY_NAME[OPTION_NAMES[target]]
            if var.status is Status.REFUSED and value != var.accepts:
                raise ConfigError(f"{key}={value!r} is not supported: {var.doc}")
            if var.field is None:
                warnings.append(f"additional_config['rbln'][{key!r}] has no effect: {var.doc}")
                continue
            target = var.field
        if target not in sources:
            hint = did_you_mean(target, [*sources, *OPTION_NAMES])
            raise ConfigError(f"Unknown option {key!r} in additional_config['rbln']{hint}")
        if target in _IDLE and not _is_default(target, value):
            warnings.append(f"{target} has no effect: {_IDLE[target].doc}")
        values[target] = value
        sources[target] = _ADDITIONAL


def _origin(message: str, sources: Mapping[str, str]) -> str:
    """Say where the fields that an error message mentions came from."""
    origins = [
        f"{name} from {source}"
        for name, source in sources.items()
        if source != "default" and name in message
    ]
    return f" ({', '.join(origins)})" if origins else ""
