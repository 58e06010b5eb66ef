"""Imports of vLLM that a start does not need, which run when something uses them.

See the ledger, ``patches``. vLLM imports all that any platform, model or request may use: 5,100
modules in each process. Each row names a module that is deferred and what it brings along.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from rbln_backend.errors import ConfigError
from rbln_backend.host.deferred_imports import (
    deferred_imports,
    followed_import,
    import_deferred,
)
from rbln_backend.settings import resolve
from rbln_backend.vllm_compat.model_names import MODULE, ModelNames

# In every process.
_COMMON = (
    # Dynamo, with sympy and DTensors, 900 modules: a warm start captures no graph.
    "torch._dynamo",
    "torch._dynamo.symbolic_convert",
    "torch._inductor.standalone_compile",
    "torch.export",
    # Models of transformers and its attention kernels. Its configurations import the names of
    # activations, and those the kernels.
    "transformers.conversion_mapping",
    "transformers.integrations.flash_attention",
    "transformers.modeling_flash_attention_utils",
    "transformers.models.auto.image_processing_auto",
    "vllm.transformers_utils.processor",
    # HTTP clients that fetch images and models.
    "vllm.connections",
    "vllm.multimodal.media.connector",
    "openai._vendor.httpx_aiohttp.transport",
    # Types of evaluations, which take longest of the OpenAI client's.
    "openai.types.eval_create_params",
    "openai.types.eval_create_response",
    "openai.types.eval_list_response",
    "openai.types.eval_retrieve_response",
    "openai.types.eval_update_response",
    # Exporters of traces, with gRPC and protobuf.
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    # setuptools, for an allocator of CUDA memory.
    "vllm.distributed.device_communicators.pynccl_allocator",
    "vllm.entrypoints.mcp.tool_server",
    # compressed-tensors, for which vLLM looks in every model.
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.v1.structured_output.backend_xgrammar",
)
# In the engine's process, which parses no answers: the OpenAI client's 530 types, and FastAPI.
_ENGINE = (
    "vllm.parser.abstract_parser",
    "vllm.parser.engine.adapters",
    "vllm.parser.harmony",
)
# In the HTTP process, which computes on no meta tensors: PyTorch's Python kernels for them, with
# the decompositions that they are part of.
_HTTP = ("torch._meta_registrations",)
# The HTTP process needs these to answer, and imports them while the engine loads: xgrammar, and the
# models of vLLM's Responses API, which the flags of tool parsers bring along.
_SERVING = ("vllm.parser.harmony", "vllm.entrypoints.openai.responses.protocol")


class DynamoMarks:
    """Calls of Dynamo's decorators, made when Dynamo is first needed.

    Invariant: a function runs and is captured as if it had been decorated at once.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Postpone the decorators that the block calls."""
        import torch

        with ExitStack() as stack:
            for name in _MARKS:
                mark = getattr(torch.compiler, name)
                stack.enter_context(_put(torch.compiler, name, partial(self._postpone, mark)))
            stack.enter_context(_put(torch, "compile", partial(_compiled_late, torch.compile)))
            stack.enter_context(_put(torch._library.utils, "get_source", _caller))
            stack.enter_context(_put(torch, "_check_with", partial(_checked, torch._check_with)))
            yield

    def apply(self) -> None:
        """Make the postponed calls, which imports Dynamo."""
        while self._calls:
            self._calls.pop()()

    def _postpone(self, mark: Callable[[Any], object], fn: Any) -> Any:
        if not isinstance(fn, FunctionType):
            return mark(fn)
        self._calls.append(partial(mark, fn))
        return fn


# Each marks a function in Dynamo's tables and returns it.
_MARKS = ("allow_in_graph", "assume_constant_result")
dynamo_marks = DynamoMarks()


@contextmanager
def start_imports(*, engine: bool) -> Iterator[None]:
    """Leave out in the block what a start does not need; ``engine``: in the process of graphs."""
    with (
        deferred_imports((*_COMMON, *(_ENGINE if engine else (*_HTTP, *_SERVING)))),
        followed_import(MODULE, lambda module: _model_names().install(module)),
        dynamo_marks.postponed(),
    ):
        yield


def import_serving() -> None:
    """Import what the HTTP process needs only to answer; call it before vLLM's serving modules."""
    import_deferred(_SERVING)


def _model_names() -> ModelNames:
    try:
        config = resolve(None).config
    except ConfigError:
        # The engine's configuration reports this error with all settings.
        return ModelNames(None, writes=False)
    return ModelNames(Path(config.cache_root) / "rbln", writes=not config.cache_read_only)


@contextmanager
def _put(module: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module in the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _caller(stacklevel: int) -> str:
    """Replace torch's ``get_source``, which reads the caller's source to name its place.

    ``inspect`` looks for that file in all modules, for each of 190 operators.
    """
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _checked(
    check: Callable[..., None], error: type[Exception], is_met: Any, message: Callable[[], str]
) -> None:
    """Replace ``torch._check_with``, which imports symbolic shapes to look at a bool."""
    if is_met is not True:
        check(error, is_met, message)


def _compiled_late(
    compile_: Callable[..., Any], model: Any = None, **options: Any
) -> Callable[..., Any]:
    """Replace ``torch.compile``: the function is compiled by its first call."""
    if model is None:
        return partial(_compiled_late, compile_, **options)
    if not isinstance(model, FunctionType):
        return cast(Callable[..., Any], compile_(model, **options))
    compiled: Callable[..., Any] | None = None

    @wraps(model)
    def run(*args: Any, **named: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = compile_(model, **options)
        return compiled(*args, **named)

    # Dynamo follows this attribute of compiled functions while it captures their callers.
    run._torchdynamo_inline = model  # type: ignore[attr-defined]
    return run
