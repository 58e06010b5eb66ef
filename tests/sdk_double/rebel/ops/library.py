"""Definition of an op: schema, a shape for tracing, a body on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from rebel.rules import is_on
from torch import Tensor

# As a C++ library of the SDK would: a second definition of the namespace is an error.
CUSTOM = torch.library.Library("rbln_custom_ops", "DEF")
RBLN = torch.library.Library("rbln", "DEF")

_OPTIONAL = re.compile(r"(\w+\? \w+)(?=[,)])")


def define(
    library: torch.library.Library,
    name: str,
    arguments: str,
    body: Callable[..., Any],
    fake: Callable[..., Any],
    result: str = "Tensor",
) -> None:
    """Define ``name(arguments) -> result``.

    No argument has a default while the rule ``schema`` is on: no open source shows one, and the
    vendor's callers pass all of them.
    """
    if not is_on("schema"):
        arguments = _OPTIONAL.sub(r"\1=None", arguments + ")")[:-1]
    library.define(f"{name}({arguments}) -> {result}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    library.impl(name, body, "CPU")


def describe(tensor: Tensor | None) -> str:
    """``int64[2, 1]``."""
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
