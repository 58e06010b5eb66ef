"""The allow-list of operators that a stored program may name.

A program is data. Each name is looked up in the tables below, so a program from elsewhere can do
arithmetic on tensors and nothing else.

The RBLN SDK registers its ops when it is imported, and no open source shows their schemas: what is
known is what the vendor's vllm-rbln 0.12 passes (``PASSED``). Here it is compared with what is
installed. Arguments that its release 0.12.1a8 adds are passed where the installed op has them.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._C import FunctionSchema

from rbln_backend import collectives
from rbln_backend.errors import CompileError, UnsupportedModelError

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


def get_namespace(name: str) -> str:
    """Return the namespace that the SDK registers an op in."""
    return "rbln" if name in _SAMPLING else NAMESPACE


def passed_schema(name: str) -> torch._C.FunctionSchema:
    """The schema of an op as this backend calls it."""
    return torch._C.parse_schema(f"{get_namespace(name)}::{name}({PASSED[name]}) -> Tensor")


def stored_schema(name: str) -> torch._C.FunctionSchema:
    """The schema of all forms of an op: what only one of them passes is optional."""
    own = [text.split("*, ")[1] for form, text in PASSED.items() if form.startswith(f"{name}.")]
    own += [text for form, text in LATER.items() if form.partition(".")[0] == name]
    further = re.sub(r"(\w+)\??( \w+)", r"\1?\2=None", ", ".join(own))
    arguments = f"{PASSED[name]}, *, {further}" if own else PASSED[name]
    return torch._C.parse_schema(f"{get_namespace(name)}::{name}({arguments}) -> Tensor")


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
                f"{get_namespace(name)}::{name} {problem}"
            )


def _installed(name: str) -> Any:
    """The op of the SDK, None if it has none of this name."""
    return getattr(getattr(torch.ops, get_namespace(name)), name.partition(".")[0], None)


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


Target = Callable[..., Any] | str

# Functions of torch and methods of tensors.
_BOTH = """
abs add addmm all amax any argmax bmm chunk clamp clamp_min cos cumsum div eq exp expm1 flatten
floor gather ge gt index_select le log logical_and logical_not logical_or lt masked_fill matmul max
maximum mean min minimum mm movedim mul narrow ne neg outer permute pow reciprocal relu
repeat_interleave reshape rsqrt scatter select sigmoid sin softmax split sqrt square squeeze std
sub sum tanh tensor_split tile topk transpose tril triu unbind unsqueeze var
"""
_FUNCTIONS = """
arange cat concat einsum empty empty_like full full_like ones ones_like stack where zeros zeros_like
"""
_METHODS = """
add_ bfloat16 bitwise_and_ bool clamp_ clone contiguous copy_ detach div_ expand expand_as fill_
float half index_copy_ int item long masked_fill_ mul_ new_empty new_full new_ones new_zeros repeat
scatter_ sub_ t to type_as unflatten view view_as zero_
"""
# Those of torch.nn.functional; Dynamo records some by the C++ function behind them.
_FUNCTIONAL = "embedding group_norm layer_norm normalize relu rms_norm sigmoid silu softmax tanh"
_C_FUNCTIONS = "gelu linear one_hot pad scaled_dot_product_attention silu softplus"
_OPERATORS = """
add sub mul truediv floordiv mod pow iadd isub imul itruediv eq ne lt le gt ge and_ or_ rshift
matmul neg invert getitem setitem
"""

NAMES = {
    "torch": frozenset((_BOTH + _FUNCTIONS).split()),
    "method": frozenset((_BOTH + _METHODS).split()),
    "functional": frozenset(f"{_C_FUNCTIONS} {_FUNCTIONAL}".split()),
    "nn": frozenset(_C_FUNCTIONS.split()),
    "operator": frozenset(_OPERATORS.split()),
}
"""By what stands before the dot of a stored name: what may stand after it."""

_MODULES = {
    "operator": operator,
    "torch": torch,
    "functional": torch.nn.functional,
    "nn": torch._C._nn,
}
_OP_NAMESPACES = {
    "rbln_emulated_ops",
    "rbln_emulated_kernels",
    "rbln_emulator",
    NAMESPACE,
    collectives.NAMESPACE,
}
_SINGLE_OPS = frozenset(
    ("aten::embedding", "aten::linear", "aten::index_select", "rbln::argmax", "rbln::top_k_top_p")
)

_BY_NAME: dict[str, Callable[..., Any]] = {
    f"{kind}.{name}": getattr(module, name)
    for kind, module in _MODULES.items()
    for name in sorted(NAMES[kind])
    if hasattr(module, name)
}
_BY_FUNCTION = {id(function): name for name, function in _BY_NAME.items()}


def operator_name(op: str, target: Target) -> str | None:
    """The stored name of an fx node's operator, or None when it is not on the list."""
    if op == "call_method":
        return f"method.{target}" if target in NAMES["method"] else None
    if isinstance(target, torch._ops.OpOverload):
        qualified = target._schema.name
        allowed = target.namespace in _OP_NAMESPACES or qualified in _SINGLE_OPS
        return f"op.{qualified}.{target._overloadname}" if allowed else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        default = getattr(target, "default", None)
        return operator_name(op, default) if default is not None else None
    return _BY_FUNCTION.get(id(target))


@cache
def get_schema(name: str) -> FunctionSchema | None:
    """Return the schema of a stored operator, None for a Python callable, which has none.

    Ops of the SDK have the schemas by which this backend calls them, installed or not. Raises
    ``CompileError`` for an operator that is not allowed.
    """
    kind, _, rest = name.partition(".")
    if kind != "op":
        if name in _BY_NAME or (kind == "method" and rest in NAMES["method"]):
            return None
        raise CompileError(f"operator {name!r} is not allowed in a stored program")
    qualified, _, overload = rest.rpartition(".")
    namespace, _, op_name = qualified.partition("::")
    if op_name in PASSED and namespace == get_namespace(op_name) and overload == "default":
        return stored_schema(op_name)
    return _torch_op(name)._schema


def get_target(name: str) -> tuple[str, Target]:
    """``(fx op, target)`` of a stored name; raises ``CompileError`` where there is none here."""
    kind, _, rest = name.partition(".")
    if kind == "op":
        return "call_function", _torch_op(name)
    get_schema(name)
    return ("call_method", rest) if kind == "method" else ("call_function", _BY_NAME[name])


def _torch_op(name: str) -> torch._ops.OpOverload:
    qualified, _, overload = name.partition(".")[2].rpartition(".")
    namespace, _, op_name = qualified.partition("::")
    if namespace not in _OP_NAMESPACES and qualified not in _SINGLE_OPS:
        raise CompileError(f"operator {name!r} is not allowed in a stored program")
    packet = getattr(getattr(torch.ops, namespace), op_name, None)
    found = getattr(packet, overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise CompileError(f"operator {name!r} of a stored program does not exist here")
    return found
