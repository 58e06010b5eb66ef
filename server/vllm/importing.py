"""Imports of vLLM in the HTTP process, with this server's limits."""

from __future__ import annotations

import importlib

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


def allow_stop_strings(number: int) -> None:
    """Set vLLM's limit of `stop` strings to this server's.

    vLLM's request models take their limit from its table of variables as they are imported.
    """
    from vllm import envs

    envs.environment_variables["VLLM_MAX_STOP_STRINGS"] = lambda: number


def import_serving() -> None:
    """Import what `build_frontend` needs; called in a thread while the engine loads the model."""
    for name in _SERVING_MODULES:
        importlib.import_module(name)
