"""The ops of the RBLN SDK that this backend calls, with what it passes.

The SDK registers its ops when it is imported, and no open source shows their schemas: what is known
is what the vendor's vllm-rbln 0.12 passes. Here it is compared with what is installed. Arguments
that its release 0.12.1a8 adds are passed where the installed op has them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch

from rbln_backend.errors import UnsupportedModelError

NAMESPACE = "rbln_custom_ops"
_SAMPLING = ("argmax", "top_k_top_p")

_QKV = "Tensor q, Tensor k, Tensor v, Tensor kv_cache"
_FLASH = (
    f"{_QKV}, Tensor scale, Tensor seq_idx, Tensor block_tables, Tensor dummy, Tensor? sinks,"
    " Tensor? k_scale, Tensor? v_scale, ScalarType? cache_dtype"
)
_ONE_BLOCK = (
    f"{_QKV}, Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy, Tensor? sinks"
)
_SHIFTED = (
    f"{_QKV}, Tensor cache_seq_len, Tensor cache_offset, Tensor scale, Tensor block_tables,"
    " Tensor dummy"
)
_BLOCKS = (
    "Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor down, Tensor down_scale,"
    " Tensor masked_routing_weight, Tensor group_size, str hidden_act"
)
_BIASES = "Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, Tensor? expert_map"
_LATENT = (
    "Tensor q, Tensor kv_c_normed, Tensor k_pe, Tensor kv_cache, Tensor seq_idx,"
    " Tensor block_tables, Tensor scale"
)
PASSED: Mapping[str, str] = {
    "flash_causal_attention_naive_prefill": _FLASH,
    "flash_causal_attention_naive_decode": _FLASH,
    "causal_attention_naive_prefill": _ONE_BLOCK,
    "causal_attention_naive_decode": _ONE_BLOCK,
    "sliding_window_attention_naive_prefill": f"{_SHIFTED}, Tensor? sinks",
    "sliding_window_attention_naive_decode": f"{_SHIFTED}, Tensor? attn_mask, Tensor? sinks",
    "sliding_window_attention_v1": (
        f"{_QKV}, Tensor seq_idx, Tensor scale, Tensor block_tables, int window_size,"
        " bool is_causal, Tensor? attn_mask, Tensor? sinks"
    ),
    "paged_flash_causal_mla_naive_prefill": _LATENT,
    "paged_flash_causal_mla_naive_decode": _LATENT,
    "custom_moe_glu": (
        "Tensor hidden_states, Tensor gate, Tensor up, Tensor down, Tensor masked_routing_weight,"
        " str hidden_act, Tensor? expert_map, Tensor? gate_bias, Tensor? up_bias,"
        " Tensor? down_bias"
    ),
    "custom_moe_glu_group_dequantize": f"Tensor hidden_states, {_BLOCKS}, {_BIASES}",
    "custom_moe_glu_group_dequantize.nvfp4": (
        f"Tensor hidden_states, {_BLOCKS}, {_BIASES}, *, Tensor gate_proj_scale_2,"
        " Tensor up_proj_scale_2, Tensor down_proj_scale_2, str weight_dtype"
    ),
    "custom_moe_glu_w8a8": (
        f"Tensor hidden_states, Tensor hidden_scale, {_BLOCKS}, ScalarType compute_dtype, {_BIASES}"
    ),
    "custom_moe_glu_mxfp4": (
        "Tensor hidden_states, Tensor gate_blocks, Tensor gate_scales, Tensor gate_bias,"
        " Tensor up_blocks, Tensor up_scales, Tensor up_bias, Tensor down_blocks,"
        " Tensor down_scales, Tensor down_bias, Tensor masked_routing_weight, Tensor alpha,"
        " Tensor limit, Tensor? expert_map"
    ),
    "argmax": "Tensor logits",
    "top_k_top_p": "Tensor probs, Tensor k, Tensor p",
}
"""By op: the arguments that are passed, by position, and by name behind ``*``; behind a dot, a form
with further ones by name."""

_SORTED = "bool is_prompt_sorted"
LATER: Mapping[str, str] = {
    **{name: _SORTED for name in PASSED if "attention" in name or "mla" in name},
    "custom_moe_glu_group_dequantize.nvfp4": (
        "float? swiglu_alpha, float? swiglu_limit, float? swiglu_beta"
    ),
}
"""By op as in ``PASSED``: arguments by name that SDK 0.12.1 adds."""


def offered(name: str, **values: bool | float | None) -> dict[str, bool | float | None]:
    """Return those of the arguments ``values`` that the installed op has."""
    packet = _installed(name)
    known = () if packet is None else packet.default._schema.arguments
    names = {argument.name for argument in known}
    return {keyword: value for keyword, value in values.items() if keyword in names}


def namespace_of(name: str) -> str:
    """Return the namespace that the SDK registers an op in."""
    return "rbln" if name in _SAMPLING else NAMESPACE


def passed_schema(name: str) -> torch._C.FunctionSchema:
    """The schema of an op as this backend calls it."""
    return torch._C.parse_schema(f"{namespace_of(name)}::{name}({PASSED[name]}) -> Tensor")


def stored_schema(name: str) -> torch._C.FunctionSchema:
    """The schema of all forms of an op: what only one of them passes is optional."""
    own = [text.split("*, ")[1] for form, text in PASSED.items() if form.startswith(f"{name}.")]
    own += [text for form, text in LATER.items() if form.partition(".")[0] == name]
    further = re.sub(r"(\w+)\??( \w+)", r"\1?\2=None", ", ".join(own))
    arguments = f"{PASSED[name]}, *, {further}" if own else PASSED[name]
    return torch._C.parse_schema(f"{namespace_of(name)}::{name}({arguments}) -> Tensor")


def signatures_digest() -> str:
    """Return a digest of the installed ops' schemas: a stored program passes what they had."""
    packets = (_installed(name) for name in sorted(PASSED))
    schemas = [str(packet.default._schema) for packet in packets if packet is not None]
    return hashlib.sha256("\n".join(schemas).encode()).hexdigest()[:16]


def check_ops(*names: str) -> None:
    """Raise ``UnsupportedModelError`` for the first op that the SDK lacks or takes otherwise."""
    for name in names:
        problem = _problem(name)
        if problem is not None:
            raise UnsupportedModelError(
                "the installed RBLN SDK cannot run this model: "
                f"{namespace_of(name)}::{name} {problem}"
            )


def _installed(name: str) -> Any:
    """The op of the SDK, None if it has none of this name."""
    return getattr(getattr(torch.ops, namespace_of(name)), name.partition(".")[0], None)


def _problem(name: str) -> str | None:
    packet = _installed(name)
    if packet is None:
        return "is missing"
    every = packet.default._schema.arguments
    passed = [one for one in passed_schema(name).arguments if not one.kwarg_only]
    named = {one.name: one for one in passed_schema(name).arguments if one.kwarg_only}
    if name in LATER:
        later = torch._C.parse_schema(f"later({LATER[name]}) -> Tensor").arguments
        has = {one.name for one in every}
        named |= {one.name: one for one in later if one.name in has}
    wanted = [one for one in every if one.name not in named]
    taken = {one.name: one for one in every if one.name in named}
    if missing := sorted(named.keys() - taken.keys()):
        return f"has no argument {missing[0]}, which is passed"
    for keyword, one in taken.items():
        if not named[keyword].type.isSubtypeOf(one.type):
            return f"takes {one.real_type} as {keyword}, {named[keyword].real_type} is passed"
    if len(wanted) < len(passed):
        return f"takes {len(wanted)} arguments, {len(passed)} are passed"
    for number, (one, other) in enumerate(zip(wanted, passed, strict=False)):
        if not other.type.isSubtypeOf(one.type):
            return (
                f"takes {one.real_type} as argument {number} ({one.name}),"
                f" {other.real_type} is passed"
            )
    for argument in wanted[len(passed) :]:
        if not argument.has_default_value():
            return f"wants {argument.name}, which is not passed"
    return None
