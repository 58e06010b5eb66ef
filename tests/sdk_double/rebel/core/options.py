"""Options of ``rbln_backend``: which are known, and of which types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rebel.compile_context import CompileContext
from rebel.rules import require

# Keys and types as vllm_rbln/compilation/compiler.py and torch_rbln send them.
KNOWN: dict[str, type | tuple[type, ...]] = {
    "_runtime_holder": list,
    "cache_dir": str,
    "compile_context": CompileContext,
    "disable_logger": bool,
    "dtype": str,
    "global_device_id": int,
    "mega_cache_only": bool,
    "mode": list,
    "model_trace_method": str,
    "num_devices": int,
    "process_group_dict": dict,
    "tensor_parallel_size": int,
    "use_global_ctx": bool,
    "use_static_output": bool,
}
_MODES = {"strict", "compile_only"}


def check_options(options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        require("options", key in KNOWN, f"unknown option {key!r}")
        known = KNOWN.get(key, object)
        exact = not isinstance(value, bool) or known is bool
        kept = isinstance(value, known) and exact and value != ""
        require("options", kept, f"{key} is {value!r}, a {type(value).__name__}")
    unknown = set(options.get("mode", ())) - _MODES
    require("options", not unknown, f"mode has {sorted(unknown)}")
    groups = options.get("process_group_dict", {})
    numbers = all(isinstance(name, str) and list(ranks) for name, ranks in groups.items())
    require("options", numbers, f"process_group_dict is {groups!r}: names to lists of ranks")


def describe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for key, value in sorted(options.items()):
        if isinstance(value, CompileContext):
            described[key] = {
                "use_weight_sharing": value.use_weight_sharing,
                "use_global_ctx": value.use_global_ctx,
            }
        elif key == "_runtime_holder":
            described[key] = "list"
        else:
            described[key] = value
    return described
