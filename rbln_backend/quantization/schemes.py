"""Which quantised weights can be multiplied by, and why others cannot; pure Python.

The reasons are those that the RBLN documentation gives. A checkpoint is judged by the fields of
its ``quantization_config``, before any of its weights is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rbln_backend.errors import UnsupportedModelError

COMPRESSED_TENSORS, GPTQ = "compressed-tensors", "auto_gptq"
METHODS = (COMPRESSED_TENSORS, GPTQ)
"""What vLLM calls the checkpoints' formats."""

PACKED_FORMAT = "pack-quantized"
CHANNEL = -1
"""The group size of weights with one scale per output channel."""
BITS, GROUP_SIZES = (4, 8), (64, 128, CHANNEL)
_INSTEAD = (
    "serve a checkpoint with symmetric weights of 4 or 8 bits in groups of 64 or 128 or with one "
    "scale per channel (compressed-tensors pack-quantized, GPTQ), or a bfloat16 copy"
)
# Weights were put in order before they were quantised, and back after: nothing to do at run time.
_STATIC_ORDERS = (None, False, "weight", "static")
_GPTQ_FORMATS = ("", "gptq", "gptq_v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How a layer's weights are quantised."""

    bits: int
    group_size: int
    """Weights along the input that share a scale, or CHANNEL."""
    symmetric: bool = True
    is_ordered: bool = False
    """Whether groups follow an order of their own (``g_idx``)."""
    kind: str = "int"

    def __str__(self) -> str:
        group = "channel" if self.group_size == CHANNEL else f"group {self.group_size}"
        return f"W{self.bits}A16 {group}"

    def obstacle(self) -> tuple[str, str] | None:
        """The first field that cannot be, and the documented reason; None if all can."""
        if self.bits not in BITS or self.kind != "int":
            return "bits", f"Weight type {self.kind}{self.bits} not supported"
        if not self.symmetric:
            return "symmetric", "Asymmetric quantization not supported"
        if self.group_size not in GROUP_SIZES:
            return "group_size", f"Group size {self.group_size} not supported"
        if self.is_ordered:
            return "order", "Group/dynamic activation ordering not supported"
        return None


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
    for field in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(field):
            raise _refusal(field, config[field], "only weights may be compressed")
    for name, group in dict(config.get("config_groups") or {}).items():
        _check_group(f"config_groups.{name}.", group, str(config.get("format")))


def _check_group(place: str, group: Mapping[str, Any], default_format: str) -> None:
    for field in ("input_activations", "output_activations"):
        if group.get(field):
            raise _refusal(place + field, group[field], "quantised activations not supported")
    written = str(group.get("format") or default_format)
    weights = dict(group.get("weights") or {})
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits")
    if written != PACKED_FORMAT:
        reason = f"Weight type {kind}{bits} in this format not supported"
        raise _refusal(f"{place}format", written, reason)
    strategy = str(weights.get("strategy"))
    if strategy not in ("group", "channel") or weights.get("dynamic"):
        field = "dynamic" if weights.get("dynamic") else "strategy"
        reason = "only static scales per group or channel are supported"
        raise _refusal(f"{place}weights.{field}", weights.get(field), reason)
    found = Weights(
        bits=int(weights["num_bits"]),
        group_size=CHANNEL if strategy == "channel" else int(weights.get("group_size") or 0),
        symmetric=bool(weights.get("symmetric", True)),
        is_ordered=weights.get("actorder") not in _STATIC_ORDERS,
        kind=kind,
    )
    _check(f"{place}weights.", found, _named(weights, _CT_FIELDS))


def _named(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """By aspect of ``Weights``: what the format calls it, and the value that it has."""
    return {aspect: (name, config.get(name)) for aspect, name in names.items()}


def _check(place: str, weights: Weights, fields: Mapping[str, tuple[str, Any]]) -> None:
    obstacle = weights.obstacle()
    if obstacle is not None:
        name, value = fields[obstacle[0]]
        raise _refusal(place + name, value, obstacle[1])


def _refusal(field: str, value: object, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config.{field} is {value!r}: {reason} by the RBLN backend; {_INSTEAD}"
    )


def summary(layers: Sequence[str]) -> str | None:
    """The kinds of quantised layers and how many there are of each; None without any."""
    return ", ".join(_counts(layers)) or None


def _counts(layers: Sequence[str]) -> Iterator[str]:
    for kind in dict.fromkeys(layers):
        count = layers.count(kind)
        yield f"{count} {'layer' if count == 1 else 'layers'} {kind}"
