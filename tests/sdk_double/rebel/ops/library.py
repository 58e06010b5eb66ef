"""Definition of an op: schema, a shape for tracing, a body on the CPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from rebel.device_info import target_name
from rebel.rules import is_on, require
from rebel.settings import SETTINGS
from torch import Tensor

# As a C++ library of the SDK would: a second definition of the namespace is an error.
CUSTOM = torch.library.Library("rbln_custom_ops", "DEF")
RBLN = torch.library.Library("rbln", "DEF")

SORTED = "bool is_prompt_sorted"
"""The argument of attention ops that release 0.12.1 adds."""

_OPTIONAL = re.compile(r"(\w+\? \w+)(?=[,)])")


def define(
    library: torch.library.Library,
    name: str,
    arguments: str,
    body: Callable[..., Any],
    fake: Callable[..., Any],
    result: str = "Tensor",
    later: str = "",
) -> None:
    """Define ``name(arguments) -> result``; release 0.12.1 has the arguments ``later``, too.

    No argument has a default while the rule ``schema`` is on: no open source shows one, and the
    vendor's callers pass all of them.
    """
    if not is_on("schema"):
        arguments = _OPTIONAL.sub(r"\1=None", arguments + ")")[:-1]
    if later and SETTINGS.is_next:
        arguments += f", {later}" if "*" in arguments else f", *, {later}"
    if later == SORTED:
        body, fake = _in_order(body), _in_order(fake)
    library.define(f"{name}({arguments}) -> {result}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    library.impl(name, body, "CPU")


_sorted_rows = [False]


def has_sorted_rows() -> bool:
    """Return whether the op that runs reads a batch as CR13's batched kernel does."""
    return _sorted_rows[0]


def _in_order(run: Callable[..., Any]) -> Callable[..., Any]:
    """Run an attention op, which in 0.12.0 goes by the NPU alone."""

    @functools.wraps(run)
    def run_in_order(*arguments: Any, is_prompt_sorted: bool | None = None) -> Any:
        is_newest = target_name() == "RBLN-CR13"
        kept = not is_prompt_sorted or is_newest
        require("schema", kept, f"is_prompt_sorted on {target_name()}")
        _sorted_rows[0] = is_newest if is_prompt_sorted is None else is_prompt_sorted
        return run(*arguments)

    return run_in_order


def describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
