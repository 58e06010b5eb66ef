"""Settings of a service: documented variables, and `RblnConfig` from them and from options.

`additional_config` overrides the environment, that the defaults. This is the only module of the
backend that reads the environment. `RBLN_*` names outside the table belong to the RBLN SDK, which
reads them itself. A `VLLM_RBLN_*` name outside the table is an error, unless the SDK is newer than
this project, and has new ones. No row of the table holds a default or a rule: the fields of
`RblnConfig` hold them, and declare the variables that only set a field. Rows of one field are in
order of precedence.
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

from packaging.version import Version
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from rbln_backend.buckets import EngineBuckets
from rbln_backend.config import (
    STRICT,
    WORD,
    Count,
    Env,
    Form,
    Number,
    RblnConfig,
    Switch,
    read_number,
)
from rbln_backend.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN_SDK, NEXT_SDK = "0.12.0", "0.12.1"
"""The newest RBLN SDK whose names are all in the table, and the one that `SDK_RULES` is of."""

KINDS: Mapping[str, Any] = {
    name: kind
    for name, kind in get_type_hints(RblnConfig, include_extras=True).items()
    if name in RblnConfig.model_fields
}
"""Type of each field, with its rules."""


class Status(enum.Enum):
    """Treatment of a documented name."""

    HONOURED = "honoured"
    ALIAS = "alias, deprecated"
    NO_EFFECT = "accepted, no effect"
    REFUSED = "refused unless it asks for what is done anyway"
    OF_SDK = "read by the SDK"


_HONOURED, _ALIAS = Status.HONOURED, Status.ALIAS
_IDLE, _REFUSED = Status.NO_EFFECT, Status.REFUSED


def get_form(kind: Any) -> Form:
    """Return the notation of a type's values."""
    inner, *marks = get_args(kind)
    choices = [f"`{choice}`" for choice in get_args(inner)]
    by_choice = Form(", ".join(choices), " or ".join(choices))
    return next((mark for mark in marks if isinstance(mark, Form)), by_choice)


@dataclass(frozen=True, slots=True)
class Variable:
    """One documented name, read as the field that it sets, else as `type`.

    `accepts` is the only value that a REFUSED name may hold, and the one of a NO_EFFECT name that
    gives no warning.
    """

    name: str
    status: Status
    doc: str
    field: str | None = None
    type: Any = Switch
    written: Form | None = None
    accepts: object = None

    @property
    def kind(self) -> Any:
        return self.type if self.field is None else KINDS[self.field]

    @property
    def form(self) -> Form:
        return self.written or get_form(self.kind)


def _declared() -> Iterator[Variable]:
    for name, info in RblnConfig.model_fields.items():
        doc = " ".join(str(info.description).split())
        for mark in info.metadata:
            if isinstance(mark, Env):
                yield Variable(mark.name, _HONOURED, doc, name)


def _read_triton(text: str) -> bool:
    if text.strip().lower() != "triton":
        raise ValueError("Valid choices: triton")
    return True


_AnyText: TypeAlias = Annotated[str, Form("text", "text, may be empty")]
_DpImpl: TypeAlias = Annotated[Literal["padded_decode", "dummy_prefill"], WORD]

# By the XDG specification an empty variable counts as unset.
_XDG = Form("", "directory", lambda text: str(Path(text) / "vllm") if text else None)
_OMP = Form("", "integers > 0, the first counts", lambda text: read_number(text.split(",")[0]))
_TRITON = Form("", "`triton`", _read_triton)

_NO_OPTIMUM = "This backend runs vLLM's own model code and has no optimum path."
_ONE_OP = "The op follows from whether a sequence fits in one block."
_NO_MOE = "Tokens of experts are always gathered, and their sums scattered."
_NO_ALL2ALL = "Every rank is given all tokens and adds up its experts' part of them."

VARIABLES: tuple[Variable, ...] = (
    *_declared(),
    Variable(
        "XDG_CACHE_HOME", _HONOURED, "Its `vllm/`, as vLLM reads it.", "cache_root", written=_XDG
    ),
    Variable(
        "OMP_NUM_THREADS", _HONOURED, "As OpenMP programs read it.", "num_threads", written=_OMP
    ),
    Variable(
        "RBLN_KERNEL_MODE",
        _ALIAS,
        "Switch of early releases.",
        "use_custom_kernel",
        written=_TRITON,
    ),
    Variable(
        "RBLN_NPUS_PER_DEVICE",
        Status.OF_SDK,
        "Set for ranks of several NPUs; refused from SDK 0.12.1 on, unless 1.",
        type=Number,
    ),
    Variable("VLLM_RBLN_TP_SIZE", _ALIAS, "Name up to 0.10.", "num_devices_per_local_rank"),
    Variable("RBLN_TARGET_SOC", _ALIAS, "Name up to 0.11.", "force_npu_name"),
    Variable("VLLM_RBLN_USE_VLLM_MODEL", _REFUSED, _NO_OPTIMUM, accepts=True),
    Variable(
        "VLLM_RBLN_COMPILE_MODEL",
        _REFUSED,
        "Graphs are always compiled; there is no eager path.",
        accepts=True,
    ),
    Variable(
        "VLLM_RBLN_COMPILE_ONLY",
        _REFUSED,
        "Use `rbln-serve compile`, which fills the store and ends.",
        accepts=False,
    ),
    Variable("VLLM_RBLN_DISPATCH_ALL2ALL", _REFUSED, _NO_ALL2ALL, accepts=False),
    Variable("VLLM_RBLN_COMBINE_ALL2ALL", _REFUSED, _NO_ALL2ALL, accepts=False),
    Variable(
        "VLLM_RBLN_DP_IMPL",
        _REFUSED,
        "Dummy prefills do not exist here.",
        type=_DpImpl,
        accepts="padded_decode",
    ),
    Variable(
        "VLLM_RBLN_NUM_HIDDEN_LAYERS",
        _IDLE,
        "The whole model is built; `rbln-parity --num-hidden-layers` runs its first layers.",
        type=Count,
        accepts=0,
    ),
    Variable(
        "VLLM_RBLN_DISABLE_WORKER_FAIL_FAST",
        _IDLE,
        "A worker that ends ends the engine, and the server with it.",
        accepts=False,
    ),
    Variable(
        "VLLM_RBLN_USE_DYNAMIC_KV_CACHE",
        _IDLE,
        "KV caches are sized by an estimate before graphs compile, or by "
        "`--num-gpu-blocks-override`.",
        accepts=False,
    ),
    Variable("VLLM_RBLN_FLASH_CAUSAL_ATTN", _IDLE, _ONE_OP, accepts=True),
    Variable(
        "VLLM_RBLN_USE_NESTED_COMPILE_REGION",
        _IDLE,
        "Every graph is compiled whole.",
        accepts=False,
    ),
    Variable("VLLM_RBLN_METRICS", _IDLE, "Metrics are always on, at `/metrics`."),
    Variable("VLLM_RBLN_METRICS_FILE", _IDLE, "Metrics are read at `/metrics`.", type=_AnyText),
    Variable("VLLM_RBLN_METRICS_DIR", _IDLE, "Metrics are read at `/metrics`.", type=_AnyText),
    Variable(
        "VLLM_RBLN_NUMA", _IDLE, "The system places threads; `taskset` or a cpuset limits them."
    ),
    Variable(
        "VLLM_RBLN_SORT_BATCH", _IDLE, "Rows go longest first where the NPU's kernels want it."
    ),
    Variable("VLLM_RBLN_BATCH_ATTN_OPT", _IDLE, "One attention op serves every batch."),
    Variable("VLLM_RBLN_NUM_RAY_NODES", _IDLE, "Ray's placement decides.", type=Number),
    Variable("VLLM_RBLN_DISABLE_OFFLOAD", _IDLE, "Weights are never offloaded."),
    Variable(
        "VLLM_RBLN_BACKFILL_TRACE_REQS", _IDLE, "Tracing follows vLLM's flags.", type=_AnyText
    ),
    Variable("VLLM_RBLN_DP_INPUT_ALL_GATHER", _IDLE, _NO_MOE),
    Variable("VLLM_RBLN_LOGITS_ALL_GATHER", _IDLE, "vLLM's logits processor decides."),
    Variable("VLLM_RBLN_SPECIALIZE_MOE_DECODE", _IDLE, "Decode graphs are always small."),
    Variable("VLLM_RBLN_MOE_REDUCE_SCATTER", _IDLE, _NO_MOE),
)


@dataclass(frozen=True, slots=True)
class SdkRule:
    """A name whose treatment follows the SDK: up to `KNOWN_SDK`, and from `NEXT_SDK` on.

    The source is vllm-rbln 0.12.1a8. `later` follows the name in messages. `accepts` is the only
    value that a variable may then hold; None: any, with a warning.
    """

    name: str
    known: str
    later: str
    accepts: object = None


SDK_RULES: Mapping[str, SdkRule] = {
    rule.name: rule
    for rule in (
        SdkRule(
            "is_prompt_sorted",
            "the attention ops do not have it",
            "is given to attention ops: true on RBLN-CR13, whose decode rows go longest first",
        ),
        SdkRule(
            "swiglu_alpha, swiglu_limit, swiglu_beta",
            "the op of NVFP4 experts does not have them",
            "are given to the op of NVFP4 experts",
        ),
        SdkRule("top_p", "`sample_on_device`: at most 0.995", "`sample_on_device`: up to 1"),
        SdkRule(
            "--block-size", "1,024 tokens unless given", "must be given, and at most 16,384 tokens"
        ),
        SdkRule(
            "--max-num-batched-tokens",
            "256 unless given; above the block size it is the block size",
            "is 512 unless given, and at most the block size",
        ),
        SdkRule(
            "num_devices_per_local_rank",
            "above 1 on RBLN-CA alone",
            "is 1: use --tensor-parallel-size",
        ),
        SdkRule(
            "RBLN_NPUS_PER_DEVICE",
            "read by the SDK; set for ranks of several NPUs",
            "is gone: one rank has one NPU, use --tensor-parallel-size",
            accepts=1,
        ),
        SdkRule("--device-ids", "names the NPUs of ranks", "names the NPUs of ranks"),
        SdkRule(
            "VLLM_RBLN_METRICS_FILE",
            "accepted, no effect",
            "is gone, and has no effect: metrics are read at `/metrics`",
        ),
        SdkRule(
            "VLLM_RBLN_BATCH_ATTN_OPT",
            "accepted, no effect",
            "is gone, and has no effect: rows go longest first where the NPU wants it",
        ),
        SdkRule(
            "VLLM_RBLN_USE_NESTED_COMPILE_REGION",
            "accepted, no effect; the SDK does not know it",
            "accepted, no effect: every graph is compiled whole",
        ),
        SdkRule(
            "other VLLM_RBLN_* names",
            "refused",
            "are ignored with a warning: the SDK may know them",
        ),
        SdkRule(
            "M-RoPE",
            "the text of Qwen-VL runs with plain rotary embeddings",
            "is refused, also for texts: use the emulated device",
        ),
        SdkRule(
            "sleep, discard",
            "refused: weights stay loaded",
            "are refused, with selected parts, too: weights stay loaded",
        ),
        SdkRule(
            "VLLM_USE_V2_MODEL_RUNNER",
            "ignored with a warning",
            "is ignored with a warning: this backend has one model runner of its own",
        ),
    )
}
"""The next release of the SDK, by name."""


def newer_sdk() -> str | None:
    """Return the version of an installed SDK above `KNOWN_SDK`, whose rules are the later ones."""
    try:
        version = importlib.metadata.version("rebel-compiler")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if Version(version).release > Version(KNOWN_SDK).release else None


def later_rule(name: str, shown: str, version: str) -> str:
    """Return the error text for ``shown``, a value or setting of a name in `SDK_RULES`."""
    return f"{shown}: with RBLN SDK {version}, {name} {SDK_RULES[name].later}"


BY_NAME: Mapping[str, Variable] = {variable.name: variable for variable in VARIABLES}

OPTION_NAMES: Mapping[str, str] = {
    "use_custom_sampler": "VLLM_RBLN_SAMPLER",
    "enable_sub_block_cache": "VLLM_RBLN_SUB_BLOCK_CACHE",
    "use_batch_attn_opt": "VLLM_RBLN_BATCH_ATTN_OPT",
    "specialize_moe_decode": "VLLM_RBLN_SPECIALIZE_MOE_DECODE",
    "use_all2all_dispatch": "VLLM_RBLN_DISPATCH_ALL2ALL",
    "use_all2all_combine": "VLLM_RBLN_COMBINE_ALL2ALL",
    "use_dynamic_kv_cache": "VLLM_RBLN_USE_DYNAMIC_KV_CACHE",
}
"""Keys of vllm-rbln 0.12's `additional_config` that differ from our field, and their variable."""


_PREFIX = "VLLM_RBLN_"
_OPTIONS = "additional_config"
# Keys that vLLM itself writes into `additional_config`, from flags of state-space models.
_OF_VLLM = frozenset({"gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend"})
_ROOT = "cache_root"

# Fields whose variable is refused or has no effect; the same holds for the option.
_LIMITED = {v.field: v for v in VARIABLES if v.status in (Status.NO_EFFECT, Status.REFUSED)}

# Messages that replace pydantic's, by error type.
_WORDS = {
    "bool_type": "Valid choices: true, false",
    "tuple_type": "must be a list",
    "string_too_short": "must not be empty",
    "too_short": "must have at least one entry",
}


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration, and warnings for the operator."""

    config: RblnConfig
    warnings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Address, credentials and cache of a model hub; None: the default of `huggingface_hub`."""

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)
    cache: Path | None = None
    is_offline: bool = False


@dataclass(frozen=True, slots=True)
class _Findings:
    """Checked values of fields, their sources, and warnings."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def take(self, name: str, value: object, source: str) -> None:
        self.values[name] = value
        self.sources[name] = source


def resolve(
    additional: Mapping[str, object] | None, environ: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """Build the config from vLLM's whole `additional_config` and the process's environment.

    Raises `ConfigError` for an unknown `VLLM_RBLN_*` name or option, a malformed value, an option
    that is given twice, or a request that this backend refuses, each naming the variable or option
    and its value.
    """
    found = _Findings()
    _read_environment(os.environ if environ is None else environ, found)
    _read_options(given_options(additional or {}), found)
    if _ROOT not in found.values:
        # The one default that has to be checked: it may need a home directory.
        default = RblnConfig.model_fields[_ROOT].default
        found.take(_ROOT, _checked(KINDS[_ROOT], default, _ROOT, repr(default)), "")
    # Each value is checked already, and has the type of its field.
    config = RblnConfig.model_construct(**found.values)
    try:
        config.check_buckets()
    except PydanticCustomError as error:
        # Across fields: it names their sources.
        names, sources = (error.context or {})["fields"], found.sources
        origins = [f"{name} from {sources[name]}" for name in names if name in sources]
        more = f" ({', '.join(origins)})" if origins else ""
        raise ConfigError(f"{error.message()}{more}") from None
    return ResolvedConfig(config, found.warnings)


def given_options(additional: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of this backend: the object `rbln` and, as vllm-rbln has them, flat keys.

    Raises `ConfigError` if `rbln` is no object, or if an option is in both places.
    """
    section = additional.get("rbln", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"Invalid {_OPTIONS}['rbln']: {section!r}, must be an object")
    flat = {key: additional[key] for key in additional if key not in ("rbln", *_OF_VLLM)}
    if twice := sorted(flat.keys() & section.keys()):
        raise ConfigError(
            f"{twice[0]!r} is in {_OPTIONS} and in {_OPTIONS}['rbln']; give one of them"
        )
    return {**flat, **section}


def options_of_vllm(additional: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `additional_config` that vLLM's models read."""
    return {key: additional[key] for key in additional if key in _OF_VLLM}


def hub_settings(environ: Mapping[str, str] | None = None) -> HubSettings:
    """Return the settings of the model hub from the variables of `huggingface_hub`.

    It reads HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE.
    """
    given = os.environ if environ is None else environ
    offline = given.get("HF_HUB_OFFLINE") or given.get("TRANSFORMERS_OFFLINE") or ""
    cache = given.get("HF_HUB_CACHE")
    return HubSettings(
        endpoint=(given.get("HF_ENDPOINT") or "").rstrip("/") or None,
        token=given.get("HF_TOKEN") or None,
        cache=Path(cache).expanduser() if cache else None,
        is_offline=offline.upper() in ("1", "ON", "YES", "TRUE"),
    )


def child_environ(*, settings: bool, **more: str) -> dict[str, str]:
    """Return this process's environment without vLLM's settings, with ``more`` variables.

    ``settings`` keeps those of the RBLN backend. The cache root always stays.
    """
    kept = ("VLLM_CACHE_ROOT", *((_PREFIX, "RBLN_") if settings else ()))
    foreign = ("VLLM_", "RBLN_")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(kept) or not name.startswith(foreign)
    }
    return environ | more


def _read_environment(environ: Mapping[str, str], found: _Findings) -> None:
    for name in environ:
        if name.startswith(_PREFIX) and name not in BY_NAME:
            if (version := newer_sdk()) is not None:
                found.warnings.append(f"{name} is unknown, and ignored: RBLN SDK {version} is new")
                continue
            hint = _did_you_mean(name, (known for known in BY_NAME if known.startswith(_PREFIX)))
            raise ConfigError(f"Unknown environment variable {name}{hint}")
    for variable in VARIABLES:
        text = environ.get(variable.name)
        if text is None:
            continue
        try:
            value = variable.form.read(text)
        except ValueError as error:
            raise ConfigError(f"Invalid {variable.name}: {text}, {error}") from None
        if value is not None:
            value = _checked(variable.kind, value, variable.name, text)
            _limit(variable, value, variable.name, text, found)
        target = variable.field
        if value is None or target is None:
            continue
        if variable.status is Status.ALIAS:
            primary = next(other.name for other in VARIABLES if other.field == target)
            ignored = found.values.get(target, value) != value
            advice = (
                f"ignored because {primary} is set" if ignored else f"deprecated, use {primary}"
            )
            found.warnings.append(f"{variable.name} is {advice}")
        if target not in found.values:
            found.take(target, value, f"environment {variable.name}")


def _read_options(options: Mapping[str, Any], found: _Findings) -> None:
    for key, given in options.items():
        variable = BY_NAME[OPTION_NAMES[key]] if key in OPTION_NAMES else _LIMITED.get(key)
        target = variable.field if variable else key
        kind = variable.kind if variable else KINDS.get(key)
        if kind is None:
            hint = _did_you_mean(str(key), [*KINDS, *OPTION_NAMES])
            raise ConfigError(f"Unknown option {key!r} in {_OPTIONS}{hint}")
        value = _checked(kind, given, key, repr(given), " (from additional_config)")
        if variable:
            _limit(variable, value, key, repr(given), found)
        if target is not None:
            found.take(target, value, "additional_config")


def _checked(kind: Any, value: object, label: str, shown: str, source: str = "") -> object:
    """Return the value as its type normalises it; raises `ConfigError`."""
    try:
        return TypeAdapter(kind, config=STRICT).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"Invalid {label}: {shown}, {_reason(error)}{source}") from None


def _limit(variable: Variable, value: object, label: str, shown: str, found: _Findings) -> None:
    """Refuse a value that is not supported, or warn that it has no effect."""
    rule, version = SDK_RULES.get(variable.name), newer_sdk()
    if rule is not None and version is not None and variable.accepts is None:
        message = later_rule(rule.name, f"{label}={shown}", version)
        if rule.accepts is None:
            found.warnings.append(message)
        elif value != rule.accepts:
            raise ConfigError(message)
        return
    if variable.status is Status.REFUSED and value != variable.accepts:
        raise ConfigError(f"{label}={shown} is not supported: {variable.doc}")
    is_usual = variable.accepts is not None and variable.accepts == value
    if variable.status is Status.NO_EFFECT and not is_usual:
        found.warnings.append(f"{label} has no effect: {variable.doc}")


def _reason(error: ValidationError) -> str:
    """Return the reason of an error, worded to follow a value."""
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if first["type"] == "literal_error":
        choices = str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        return f"Valid choices: {choices}"
    words = _WORDS.get(first["type"], said)
    is_in_list = bool(first["loc"]) and isinstance(first["loc"][-1], int)
    return f"each {words}" if is_in_list else words


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known names: {', '.join(options)}"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The object that replaces the mapping in `VllmConfig.additional_config`.

    vLLM accepts any object there that has `compute_hash`, and pickles it with the rest.
    """

    rbln: RblnConfig
    local_engines: int
    """Data-parallel engines on this host, which vLLM does not pass to engines of dense models."""
    others: Mapping[str, Any]
    """Entries of the mapping that vLLM's own models read."""
    buckets: EngineBuckets | None = None
    """The compiled sizes; None where vLLM makes a configuration without a model."""

    def compute_hash(self) -> str:
        """Return the digest by which vLLM compares configurations."""
        content = [self.rbln.to_dict(), self.local_engines, dict(self.others)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def engine_settings(config: VllmConfig) -> EngineSettings:
    """Return what the platform stored in vLLM's configuration."""
    found = config.additional_config
    assert isinstance(found, EngineSettings), "RblnPlatform.check_and_update_config ran first"
    return found


def compiled_sizes(config: VllmConfig) -> EngineBuckets:
    found = engine_settings(config).buckets
    assert found is not None, "an engine has a model"
    return found


def largest_decode(config: VllmConfig) -> int:
    stages = config.parallel_config.pipeline_parallel_size
    return config.scheduler_config.max_num_seqs // stages


def configured(config: VllmConfig) -> RblnConfig:
    return engine_settings(config).rbln
