"""The allow-list of operators a stored program may name, and the signatures of each.

A program is data. Each name is looked up in the tables below and each call is checked against a
signature, so a program from elsewhere can do arithmetic on tensors and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from rbln_backend.compiler.programs import sdk_schemas
from rbln_backend.compiler.programs.python_signatures import BY_KIND
from rbln_backend.compiler.programs.sdk_schemas import PASSED, passed_schema
from rbln_backend.compiler.programs.signatures import Signature, of_schema
from rbln_backend.errors import CompileError
from rbln_backend.parallel import collectives

Target = Callable[..., Any] | str

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
    for name in BY_KIND[kind]
    if hasattr(module, name)
}
_BY_FUNCTION = {id(function): name for name, function in _BY_NAME.items()}


def operator_name(op: str, target: Target) -> str | None:
    """The stored name of an fx node's operator, or None when it is not on the list."""
    if op == "call_method":
        return f"method.{target}" if target in BY_KIND["method"] else None
    if isinstance(target, torch._ops.OpOverload):
        qualified = target._schema.name
        allowed = target.namespace in _OP_NAMESPACES or qualified in _SINGLE_OPS
        return f"op.{qualified}.{target._overloadname}" if allowed else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        default = getattr(target, "default", None)
        return operator_name(op, default) if default is not None else None
    return _BY_FUNCTION.get(id(target))


@cache
def signatures_of(name: str) -> Sequence[Signature]:
    """Return the signatures of a stored operator; raises ``CompileError`` if it is not allowed.

    Ops of the SDK have the signatures by which this backend calls them, installed or not.
    """
    kind, _, rest = name.partition(".")
    if kind != "op":
        found = BY_KIND.get(kind, {}).get(rest)
        if found is None or (kind != "method" and name not in _BY_NAME):
            raise CompileError(f"operator {name!r} is not allowed in a stored program")
        return found
    qualified, _, overload = rest.rpartition(".")
    namespace, _, op_name = qualified.partition("::")
    is_passed = op_name in PASSED and namespace == sdk_schemas.namespace_of(op_name)
    if is_passed and overload == "default":
        return (of_schema(passed_schema(op_name)),)
    return (of_schema(_torch_op(name)._schema),)


def target_of(name: str) -> tuple[str, Target]:
    """``(fx op, target)`` of a stored name; raises ``CompileError`` where there is none here."""
    kind, _, rest = name.partition(".")
    if kind == "op":
        return "call_function", _torch_op(name)
    signatures_of(name)
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
