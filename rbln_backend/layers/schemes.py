"""Weight formats of quantised layers: which checkpoints can be run, and why others cannot.

Pure Python. The reasons are those that the RBLN documentation gives. A checkpoint is judged by the
fields of its ``quantization_config``, before any of its weights is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rbln_backend.errors import UnsupportedModelError

CHANNEL = -1
"""The group size of weights with one scale per output channel."""
BITS, GROUP_SIZES = (4, 8), (64, 128, CHANNEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weight format of a quantized layer."""

    bits: int
    group_size: int
    """Weights along the input that share a scale, or CHANNEL."""
    symmetric: bool = True
    is_ordered: bool = False
    """True if groups have their own input order (``g_idx``)."""
    kind: str = "int"
    """"int", "float" for e4m3 and e2m1, or "nvfp4"."""
    input_bits: int = 16
    """Of what is multiplied by; 16 stands for the model's dtype."""
    published: str = ""
    """Name of a published form that also quantizes activations, else empty."""

    def __str__(self) -> str:
        group = "channel" if self.group_size == CHANNEL else f"group {self.group_size}"
        kind = {8: " FP8", 4: " MXFP4"}[self.bits] if self.kind == "float" else ""
        kind = " NVFP4" if self.kind == "nvfp4" else kind
        zeros = "" if self.symmetric else " with zero points"
        published = f" (published as {self.published})" if self.published else ""
        return f"W{self.bits}A{self.input_bits}{kind} {group}{zeros}{published}"

    @property
    def format(self) -> str:
        """The format's name in ``devices.emulated.packing``."""
        if self.kind == "nvfp4":
            return "blocks8"
        return {8: "e4m3", 4: "e2m1"}[self.bits] if self.kind == "float" else f"int{self.bits}"

    def obstacle(self, *, may_have_zeros: bool = False) -> tuple[str, str] | None:
        """Of integers, the first field that cannot be, and the documented reason; None: none."""
        if self.bits not in BITS or self.kind != "int":
            return "bits", f"Weight type {self.kind}{self.bits} not supported"
        if not self.symmetric and not may_have_zeros:
            return "symmetric", "Asymmetric quantization not supported"
        if self.group_size not in GROUP_SIZES:
            return "group_size", f"Group size {self.group_size} not supported"
        if self.is_ordered:
            return "order", "Group/dynamic activation ordering not supported"
        return None


def summary(layers: Sequence[str]) -> str | None:
    """The kinds of quantised layers and how many there are of each; None without any."""
    return ", ".join(_counts(layers)) or None


def _counts(layers: Sequence[str]) -> Iterator[str]:
    for kind in dict.fromkeys(layers):
        count = layers.count(kind)
        yield f"{count} {'layer' if count == 1 else 'layers'} {kind}"


COMPRESSED_TENSORS, GPTQ = "compressed-tensors", "auto_gptq"
AWQ, FP8, MXFP4 = "auto_awq", "fp8", "gpt_oss_mxfp4"
MODELOPT, MODELOPT_MIXED = "modelopt", "modelopt_mixed"
"""FP8 of all layers, or of listed ones, whose experts may be in NVFP4: vLLM calls ModelOpt's other
algorithms otherwise."""
NVFP4, NVFP4_GROUPS = ("NVFP4", "W4A16_NVFP4"), (16, 32)
METHODS = (COMPRESSED_TENSORS, GPTQ, AWQ, FP8, MXFP4, MODELOPT, MODELOPT_MIXED)
"""vLLM's names of the checkpoints' formats."""

PACKED_FORMAT = "pack-quantized"
BYTE_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
"""Formats of compressed-tensors with a byte for each weight."""
BLOCK_DEPTH = 64
"""A block's depth is a multiple of it: depths that the kernels add up before they scale."""
_INSTEAD = (
    "serve weights of 4 or 8 bits in groups of 64 or 128 or with one scale per channel "
    "(compressed-tensors pack-quantized, GPTQ, AWQ), FP8, or a bfloat16 copy"
)
# Weights were put in order before they were quantised, and back after: nothing to do at run time.
_STATIC_ORDERS = (None, False, "weight", "static")
_GPTQ_FORMATS = ("", "gptq", "gptq_v2")


def check_gptq(config: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedModelError`` for a GPTQ ``quantization_config`` that cannot be run."""
    written = str(config.get("checkpoint_format") or "")
    if written not in _GPTQ_FORMATS:
        raise _refusal("checkpoint_format", written, f"Weight format {written} not supported")
    rules = config.get("dynamic") or {}
    # A rule that begins with "-:" names layers that are not quantised.
    changed = [(n, r) for n, r in rules.items() if isinstance(r, Mapping) and not n.startswith("-")]
    for rule, fields in (("", {}), *changed):
        merged = {**config, **fields}
        place = f"dynamic[{rule!r}]." if rule else ""
        _check(place, _gptq_weights(merged), _named(merged, _GPTQ_FIELDS))


_GPTQ_FIELDS = {"bits": "bits", "symmetric": "sym", "group_size": "group_size", "order": "desc_act"}
_CT_FIELDS = {
    "bits": "num_bits",
    "symmetric": "symmetric",
    "group_size": "group_size",
    "order": "actorder",
}


def _gptq_weights(config: Mapping[str, Any]) -> Weights:
    group = int(config["group_size"])
    # With one group there is no order of groups.
    is_ordered = bool(config.get("desc_act")) and group != CHANNEL
    return Weights(
        bits=int(config["bits"]),
        group_size=group,
        symmetric=bool(config.get("sym", True)),
        is_ordered=is_ordered,
    )


def check_compressed_tensors(config: Mapping[str, Any]) -> None:
    """As ``check_gptq``, of a compressed-tensors ``quantization_config``."""
    for field in ("sparsity_config", "transform_config"):
        if config.get(field):
            raise _refusal(field, config[field], "only weights and KV caches may be compressed")
    _check_kv_cache(config.get("kv_cache_scheme") or {})
    for name, group in dict(config.get("config_groups") or {}).items():
        _check_group(f"config_groups.{name}.", group, str(config.get("format")))


def _check_kv_cache(scheme: Mapping[str, Any]) -> None:
    """There are caches of e4m3, with a static scale for a layer's keys and one for its values."""
    for field, known in _KV_CACHE.items():
        found = scheme.get(field, known)
        if found != known:
            raise UnsupportedModelError(
                f"quantization_config.kv_cache_scheme.{field} is {found!r}: KV caches of a "
                f"checkpoint have {known!r} there by the RBLN backend; remove kv_cache_scheme from "
                "config.json, which leaves the cache in the model's dtype"
            )


_KV_CACHE = {
    "type": "float",
    "num_bits": 8,
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


def _check_group(place: str, group: Mapping[str, Any], default_format: str) -> None:
    if group.get("output_activations"):
        value = group["output_activations"]
        raise _refusal(f"{place}output_activations", value, "quantised outputs not supported")
    written = str(group.get("format") or default_format)
    weights = dict(group.get("weights") or {})
    activations = group.get("input_activations")
    if written in BYTE_FORMATS:
        _check_bytes(place, weights, bool(activations))
        return
    if activations:
        field = f"{place}input_activations"
        raise _refusal(field, activations, "quantised activations not supported")
    if written != PACKED_FORMAT:
        kind, bits = str(weights.get("type", "int")), weights.get("num_bits")
        reason = f"Weight type {kind}{bits} in this format not supported"
        raise _refusal(f"{place}format", written, reason)
    _check_packed(place, weights)


def _check_packed(place: str, weights: Mapping[str, Any]) -> None:
    _check_strategy(place, weights, ("group", "channel"))
    found = Weights(
        bits=int(weights["num_bits"]),
        group_size=CHANNEL if weights["strategy"] == "channel" else _group_size(weights),
        symmetric=bool(weights.get("symmetric", True)),
        is_ordered=weights.get("actorder") not in _STATIC_ORDERS,
        kind=str(weights.get("type", "int")),
    )
    _check(f"{place}weights.", found, _named(weights, _CT_FIELDS), may_have_zeros=True)


def _check_bytes(place: str, weights: Mapping[str, Any], has_activations: bool) -> None:
    """Floats or integers of a byte each; activations are never quantized."""
    _check_strategy(place, weights, ("tensor", "channel", "block"))
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits")
    if bits != 8:
        raise _refusal(f"{place}weights.num_bits", bits, f"Weight type {kind}{bits} not supported")
    if not weights.get("symmetric", True):
        reason = "Asymmetric quantization not supported"
        raise _refusal(f"{place}weights.symmetric", weights["symmetric"], reason)
    if kind == "int" and not has_activations:
        reason = "vLLM reads such integers of checkpoints with quantised activations alone"
        raise _refusal(f"{place}input_activations", None, reason)
    if weights["strategy"] == "block":
        check_block(f"{place}weights.block_structure", weights.get("block_structure"))


def _check_strategy(place: str, weights: Mapping[str, Any], known: Sequence[str]) -> None:
    if weights.get("strategy") not in known or weights.get("dynamic"):
        field = "dynamic" if weights.get("dynamic") else "strategy"
        reason = f"only static scales per {' or '.join(known)} are supported"
        raise _refusal(f"{place}weights.{field}", weights.get(field), reason)


def _group_size(weights: Mapping[str, Any]) -> int:
    return int(weights.get("group_size") or 0)


def check_fp8(config: Mapping[str, Any]) -> None:
    """As ``check_gptq``, of a ``quantization_config`` with method fp8: DeepSeek's, Qwen's, ..."""
    written = config.get("fmt", "e4m3")
    if written not in ("e4m3", "float8_e4m3fn"):
        raise _refusal("fmt", written, f"Weight type {written} not supported")
    if config.get("store_dtype"):
        raise _refusal("store_dtype", config["store_dtype"], "only weights of e4m3 are supported")
    if config.get("weight_block_size") is not None:
        check_block("weight_block_size", config["weight_block_size"])


def check_modelopt(config: Mapping[str, Any]) -> None:
    """As ``check_gptq``, of what ModelOpt writes into config.json or hf_quant_config.json."""
    fields = config.get("quantization", config)
    algorithm = str(fields.get("quant_algo")).upper()
    if algorithm != "MIXED_PRECISION":
        _check_algorithm("", fields)
        return
    for name, layer in fields.get("quantized_layers", {}).items():
        place = f"quantized_layers[{name!r}]."
        if str(layer.get("quant_algo")).upper() in NVFP4 and "experts" in name:
            _check_nvfp4(place, layer)
        else:
            _check_algorithm(place, layer)


def _check_nvfp4(place: str, fields: Mapping[str, Any]) -> None:
    group = fields.get("group_size", NVFP4_GROUPS[0])
    if group not in NVFP4_GROUPS:
        reason = f"experts in NVFP4 have groups of {' or '.join(map(str, NVFP4_GROUPS))}"
        raise _refusal(f"{place}group_size", group, reason)


def _check_algorithm(place: str, fields: Mapping[str, Any]) -> None:
    written = fields.get("quant_algo")
    algorithm = str(written).upper()
    if algorithm != "FP8":
        reason = (
            f"ModelOpt's {algorithm} not supported, FP8 with a scale per tensor alone, and NVFP4 "
            "of experts in checkpoints of mixed precision"
        )
        raise _refusal(f"{place}quant_algo", written, reason)


def check_block(field: str, block: Any) -> None:
    """Raise ``UnsupportedModelError`` for blocks that do not consist of whole chunks."""
    is_pair = isinstance(block, Sequence) and len(block) == 2
    if not is_pair or int(block[0]) < 1 or int(block[1]) < 1 or int(block[1]) % BLOCK_DEPTH:
        reason = f"only blocks of rows and a multiple of {BLOCK_DEPTH} inputs are supported"
        raise _refusal(field, block, reason)


def check_awq(config: Mapping[str, Any]) -> None:
    """As ``check_gptq``, of an AWQ ``quantization_config``."""
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refusal("version", config["version"], f"Weight order {version} not supported")
    if not config.get("zero_point", True):
        reason = "only AWQ weights with zero points are supported"
        raise _refusal("zero_point", config["zero_point"], reason)
    names = {
        aspect: next((name for name in known if name in config), known[0])
        for aspect, known in _AWQ_FIELDS.items()
    }
    bits, group = (int(config[names[aspect]]) for aspect in ("bits", "group_size"))
    if bits != 4:
        raise _refusal(names["bits"], bits, f"Weight type int{bits} not supported")
    found = Weights(bits=bits, group_size=group, symmetric=False)
    _check("", found, _named(config, names), may_have_zeros=True)


_AWQ_FIELDS = {"bits": ("w_bit", "bits"), "group_size": ("q_group_size", "group_size")}


def _named(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """By aspect of ``Weights``: what the format calls it, and the value that it has."""
    return {aspect: (name, config.get(name)) for aspect, name in names.items()}


def _check(
    place: str,
    weights: Weights,
    fields: Mapping[str, tuple[str, Any]],
    *,
    may_have_zeros: bool = False,
) -> None:
    obstacle = weights.obstacle(may_have_zeros=may_have_zeros)
    if obstacle is not None:
        name, value = fields[obstacle[0]]
        raise _refusal(place + name, value, obstacle[1])


def _refusal(field: str, value: object, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config.{field} is {value!r}: {reason} by the RBLN backend; {_INSTEAD}"
    )
