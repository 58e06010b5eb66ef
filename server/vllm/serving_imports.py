"""Imports of what answers requests, made while the engine loads the model."""

from __future__ import annotations

import importlib

from rbln_backend import api

# By name: linters remove import statements without a use.
_MODULES = (
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


def import_serving() -> None:
    """Import what `build_frontend` needs, so that it does not hold up the event loop."""
    api.import_serving()
    for name in _MODULES:
        importlib.import_module(name)
