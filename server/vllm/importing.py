"""Imports of vLLM in a process: without its compiler, with this server's limits, in two parts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from rbln_backend import api
from rbln_backend.host.deferred_imports import followed_import

if TYPE_CHECKING:
    from pydantic import BaseModel

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
_BASE_MODULE = "vllm.entrypoints.serve.engine.protocol"
# Their requests are not to wait for models of theirs.
_BUILT_MODULES = (
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.openai.completion.protocol",
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


@contextmanager
def deferred_models() -> Iterator[None]:
    """Leave pydantic's validators of vLLM's request and answer models that the block imports.

    Pydantic builds each at its first use, or `build_models` does.
    """
    with followed_import(_BASE_MODULE, _defer_builds):
        yield


def _defer_builds(_: ModuleType) -> None:
    from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

    # Subclasses inherit the configuration of their base as they are defined.
    OpenAIBaseModel.model_config["defer_build"] = True


def build_models(modules: tuple[str, ...] = ()) -> list[str]:
    """Build the models that `deferred_models` left, of `modules` or of all; return their names."""
    base = importlib.import_module(_BASE_MODULE).OpenAIBaseModel
    models = [
        model
        for model in _descendants(base)
        if not model.__pydantic_complete__ and (not modules or model.__module__ in modules)
    ]
    for model in models:
        model.model_rebuild()
    return [model.__name__ for model in models]


def _descendants(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in model.__subclasses__():
        yield below
        yield from _descendants(below)


def import_serving() -> None:
    """Import what `build_frontend` needs; called in a thread while the engine loads the model.

    Chats and completions do not wait for models; those of other requests are built once the server
    is ready.
    """
    api.import_serving()
    for name in _SERVING_MODULES:
        importlib.import_module(name)
    build_models(_BUILT_MODULES)
