"""The allow-list of operators a stored program may name.

A program is data. Loading one never evaluates text: each operator name is looked up in the tables
below, so a bundle from elsewhere can do arithmetic on tensors and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from rbln_backend.compiler.sdk import schemas
from rbln_backend.errors import CompileError
from rbln_backend.parallel import collectives

Target = Callable[..., Any] | str

_BUILTINS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in (
        "add sub mul truediv floordiv mod neg pow getitem setitem iadd isub imul itruediv "
        "eq ne lt le gt ge and_ or_ invert rshift matmul"
    ).split()
}

_TORCH = frozenset(
    (
        "abs add addmm all any arange argmax bmm cat chunk clamp concat cos cumsum div einsum "
        "empty empty_like eq exp expand expm1 flatten floor full full_like gather ge gt "
        "index_select le log logical_and logical_not logical_or lt masked_fill matmul max maximum "
        "mean min minimum mm movedim mul narrow ne neg ones ones_like outer permute pow "
        "reciprocal relu repeat repeat_interleave reshape rsqrt scatter select sigmoid sin slice "
        "softmax split sqrt square squeeze stack std sub sum tanh tensor_split tile topk "
        "transpose tril triu unbind unsqueeze var where zeros zeros_like"
    ).split()
)

_FUNCTIONAL = frozenset(
    (
        "embedding gelu group_norm layer_norm linear normalize one_hot pad relu rms_norm "
        "scaled_dot_product_attention sigmoid silu softmax softplus tanh"
    ).split()
)

_METHODS = frozenset(
    (
        "abs add add_ argmax bitwise_and_ bool chunk clamp clamp_ clone contiguous copy_ cos "
        "cumsum detach div div_ exp expand expand_as fill_ flatten float gather half bfloat16 "
        "index_copy_ index_select int item long masked_fill masked_fill_ matmul max mean min "
        "movedim mul mul_ narrow ne neg new_empty new_full new_ones new_zeros permute pow "
        "reciprocal repeat repeat_interleave reshape rsqrt scatter select sigmoid sin softmax "
        "split sqrt square squeeze sub sub_ sum t tanh to topk transpose type_as unbind unflatten "
        "unsqueeze view view_as zero_"
    ).split()
)

_OP_NAMESPACES = frozenset(
    (
        *("rbln_emulated_ops", "rbln_emulated_kernels", "rbln_emulator"),
        *(schemas.NAMESPACE, collectives.NAMESPACE),
    )
)
_ATEN_OPS = frozenset(("aten::embedding", "aten::linear", "aten::index_select"))


def _function_tables() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {f"operator.{n}": f for n, f in _BUILTINS.items()}
    for name in _TORCH:
        if hasattr(torch, name):
            table[f"torch.{name}"] = getattr(torch, name)
    for name in _FUNCTIONAL:
        table[f"functional.{name}"] = getattr(torch.nn.functional, name)
    # Dynamo records some functionals by the C++ binding behind them.
    for name in _FUNCTIONAL & set(dir(torch._C._nn)):
        table[f"nn.{name}"] = getattr(torch._C._nn, name)
    return table


_BY_NAME = _function_tables()
_BY_FUNCTION = {id(function): name for name, function in _BY_NAME.items()}


def operator_name(op: str, target: Target) -> str | None:
    """The stored name of an fx node's operator, or None when it is not on the list."""
    if op == "call_method":
        return f"method.{target}" if target in _METHODS else None
    if isinstance(target, torch._ops.OpOverload):
        qualified = target._schema.name
        allowed = target.namespace in _OP_NAMESPACES or qualified in _ATEN_OPS
        return f"op.{qualified}.{target._overloadname}" if allowed else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        default = getattr(target, "default", None)
        return operator_name(op, default) if default is not None else None
    return _BY_FUNCTION.get(id(target))


def resolve_operator(name: str) -> tuple[str, Target]:
    """``(fx op, target)`` of a stored name; raises ``CompileError`` when it is not on the list."""
    kind, _, rest = name.partition(".")
    if kind == "method" and rest in _METHODS:
        return "call_method", rest
    if kind == "op":
        return "call_function", _resolve_torch_op(name, rest)
    if name in _BY_NAME:
        return "call_function", _BY_NAME[name]
    raise CompileError(f"stored program names operator {name!r}, which is not allowed")


def _resolve_torch_op(name: str, rest: str) -> Target:
    qualified, _, overload = rest.rpartition(".")
    namespace, _, op_name = qualified.partition("::")
    if namespace not in _OP_NAMESPACES and qualified not in _ATEN_OPS:
        raise CompileError(f"stored program names operator {name!r}, which is not allowed")
    packet = getattr(getattr(torch.ops, namespace), op_name, None)
    target = getattr(packet, overload, None)
    if not isinstance(target, torch._ops.OpOverload):
        raise CompileError(f"operator {name!r} of a stored program does not exist here")
    return target
