"""The allow-list of operators that a stored program may name.

A program is data. Each name is looked up in the tables below, so a program from elsewhere can do
arithmetic on tensors and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C import FunctionSchema

from rbln_backend.compiler.programs import sdk_schemas
from rbln_backend.compiler.programs.sdk_schemas import PASSED, stored_schema
from rbln_backend.errors import CompileError
from rbln_backend.parallel import collectives

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
_EMULATED = frozenset(("rbln_emulated_ops", "rbln_emulated_kernels", "rbln_emulator"))
_OP_NAMESPACES = _EMULATED | {sdk_schemas.NAMESPACE, collectives.NAMESPACE}
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
def schema_of(name: str) -> FunctionSchema | None:
    """Return the schema of a stored operator, None for a Python callable, which has none.

    Ops of the SDK have the schemas by which this backend calls them, installed or not. Raises
    ``CompileError`` for an operator that is not allowed.
    """
    kind, _, rest = name.partition(".")
    if kind != "op":
        is_allowed = name in _BY_NAME or (kind == "method" and rest in NAMES["method"])
        if not is_allowed:
            raise CompileError(f"operator {name!r} is not allowed in a stored program")
        return None
    qualified, _, overload = rest.rpartition(".")
    namespace, _, op_name = qualified.partition("::")
    is_passed = op_name in PASSED and namespace == sdk_schemas.namespace_of(op_name)
    if is_passed and overload == "default":
        return stored_schema(op_name)
    return _torch_op(name)._schema


def target_of(name: str) -> tuple[str, Target]:
    """``(fx op, target)`` of a stored name; raises ``CompileError`` where there is none here."""
    kind, _, rest = name.partition(".")
    if kind == "op":
        return "call_function", _torch_op(name)
    schema_of(name)
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
