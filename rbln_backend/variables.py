"""Table of documented variables, and how this backend treats each.

No row holds a default or a rule: the fields of `RblnConfig` hold them, and declare the variables
that only set a field. Rows of one field are in order of precedence.
"""

from __future__ import annotations

import enum
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

from packaging.version import Version

from rbln_backend.config import WORD, Count, Env, Form, Number, RblnConfig, Switch, read_number

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


def form_of(kind: Any) -> Form:
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
        """Type of the value, with its rules."""
        return self.type if self.field is None else KINDS[self.field]

    @property
    def form(self) -> Form:
        """Notation of the value."""
        return self.written or form_of(self.kind)


def _declared() -> Iterator[Variable]:
    for name, field in RblnConfig.model_fields.items():
        doc = " ".join(str(field.description).split())
        for mark in field.metadata:
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
    Variable(
        "VLLM_RBLN_METRICS_FILE",
        _IDLE,
        "Metrics are read at `/metrics`.",
        type=_AnyText,
    ),
    Variable("VLLM_RBLN_METRICS_DIR", _IDLE, "Metrics are read at `/metrics`.", type=_AnyText),
    Variable(
        "VLLM_RBLN_NUMA", _IDLE, "The system places threads; `taskset` or a cpuset limits them."
    ),
    Variable(
        "VLLM_RBLN_SORT_BATCH", _IDLE, "Rows go longest first where the NPU's kernels want it."
    ),
    Variable(
        "VLLM_RBLN_BATCH_ATTN_OPT",
        _IDLE,
        "One attention op serves every batch.",
    ),
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
