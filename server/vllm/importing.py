"""Imports of vLLM in a process: without its compiler, with this server's limits, in two parts."""

from __future__ import annotations

import importlib
import sys

from rbln_backend import api

_INDUCTOR = "torch._inductor.lowering"
# By name: linters remove import statements without a use.
_SERVING_MODULES = (
    "server.vllm.frontend",
    "server.vllm.responses.requests",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.pooling.classify.protocol",
    "vllm.entrypoints.pooling.embed.protocol",
    "vllm.entrypoints.pooling.pooling.protocol",
    "vllm.entrypoints.pooling.scoring.protocol",
)


def import_vllm() -> None:
    """Import vLLM but not Inductor, which it loads only to change a list; saves 0.7 CPU seconds.

    See the ledger, `rbln_backend/vllm_compat/patches.py`. Does nothing once vLLM is imported.
    """
    if "vllm" in sys.modules or _INDUCTOR in sys.modules:
        return
    # None makes the import fail the way it does for a module that is not installed.
    sys.modules[_INDUCTOR] = None  # type: ignore[assignment]  # documented, but not typed
    try:
        importlib.import_module("vllm")
    finally:
        del sys.modules[_INDUCTOR]


def allow_stop_strings(number: int) -> None:
    """Set vLLM's limit of `stop` strings to this server's.

    vLLM's request models take their limit from its table of variables as they are imported.
    """
    from vllm import envs

    envs.environment_variables["VLLM_MAX_STOP_STRINGS"] = lambda: number


def import_serving() -> None:
    """Import what `build_frontend` needs; called in a thread while the engine loads the model."""
    api.import_serving()
    for name in _SERVING_MODULES:
        importlib.import_module(name)
