"""A start imports less than vLLM does, and what it leaves out works when it is used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from rbln_backend.vllm_compat.start_imports import (
    _COMMON,
    _ENGINE,
    _HTTP,
    _SERVING,
    DynamoMarks,
)

LEFT_OUT = ("torch._dynamo", "sympy", "openai", "compressed_tensors", "aiohttp", "fastapi")
ENGINE_IMPORTS = f"""
import os, sys
class Recording:
    def take_new(self):
        return None
def recorder():
    from rbln_backend.compiler.recorder import Recorder
    return Recorder(Recording())
os.setpgid = lambda *_: None
import server.engine.preload
import torch
from rbln_backend import api
# What a warm start does: the check of a graph's shapes, and a run that is recorded.
with api.start_imports(engine=True):
    numbers = torch.zeros(2, dtype=torch.int64, device="meta")
    torch.nn.functional.embedding(numbers, torch.empty(4, 4, device="meta"))
    with recorder():
        torch.ones(2) + 1
print([name for name in {LEFT_OUT!r} if name in sys.modules], "torch" in sys.modules)
"""

HTTP_LEFT_OUT = ("torch._prims", "torch._meta_registrations", "rbln_backend.vllm_compat.surface")
HTTP_IMPORTS = f"""
import sys
from rbln_backend import api
from rbln_backend.host.deferred_imports import DeferredModule
from server.vllm.importing import build_models, deferred_models, import_vllm
def has_run(name):
    return name in sys.modules and not isinstance(sys.modules[name], DeferredModule)
with api.start_imports(engine=False), deferred_models():
    import_vllm()
    import rbln_backend.worker.executor
    import torch
    # Without the kernels that were left out, a tensor without memory still has a shape.
    assert (torch.empty(2, 3, device="meta") @ torch.empty(3, 4, device="meta")).shape == (2, 4)
    print([name for name in {HTTP_LEFT_OUT!r} if has_run(name)])
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
import torch._meta_registrations
print("torch._prims" in sys.modules)
from pydantic import ValidationError
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest
class Later(CompletionRequest):
    count: int
class Latest(Later):
    pass
states = [CompletionRequest.__pydantic_complete__, Later.__pydantic_complete__]
# A model that is used first is built by its use, with all of its checks.
try:
    Later(prompt="a", count="b")
except ValidationError as error:
    states.append(error.errors()[0]["loc"])
built = build_models((CompletionRequest.__module__,))
states += ["CompletionRequest" in built, "Latest" in built, Latest.__pydantic_complete__]
states += ["Latest" in build_models(), build_models(), Latest.__pydantic_complete__]
print(states)
"""


def test_an_engine_process_is_preloaded_without_what_few_starts_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_IMPORTS], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] True"


@pytest.fixture(scope="module")
def http_lines() -> list[str]:
    """Lines of a process that imports what an HTTP process does."""
    done = subprocess.run(
        [sys.executable, "-c", HTTP_IMPORTS], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_an_http_process_starts_without_layers_and_kernels_of_tensors_without_memory(
    http_lines: list[str],
) -> None:
    assert http_lines[-3:-1] == ["[]", "True"]


def test_models_of_requests_are_built_by_their_first_use_or_together(
    http_lines: list[str],
) -> None:
    states = [False, False, ("count",), True, False, False, True, [], True]
    assert http_lines[-1] == str(states)


def test_operators_name_the_place_of_their_caller_as_torch_does() -> None:
    with DynamoMarks().postponed():
        ours = torch._library.utils.get_source(1)
    theirs = torch._library.utils.get_source(1)
    assert ours.split(":")[0] == theirs.split(":")[0] == __file__
    assert int(ours.split(":")[1]) + 1 == int(theirs.split(":")[1])


@pytest.mark.parametrize("name", [*_COMMON, *_ENGINE, *_HTTP, *_SERVING])
def test_every_deferred_module_exists(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


def test_functions_are_compiled_by_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_(function: object, **options: object) -> object:
        compiled.append((function, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    with DynamoMarks().postponed():

        @torch.compile(dynamic=True)
        def double(value: int) -> int:
            return 2 * value

    assert compiled == []
    assert [double(2), double(3)] == [4, 6]
    assert [options for _, options in compiled] == [{"dynamic": True}]
    assert torch.compile is compile_


def test_a_function_is_inlined_where_it_is_captured() -> None:
    with DynamoMarks().postponed():

        @torch.compile(dynamic=True)
        def double(value: torch.Tensor) -> torch.Tensor:
            return 2 * value

    graphs: list[torch.fx.GraphModule] = []

    def take(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append(module)
        return module.forward

    caller = torch.compile(lambda value: double(value) + 1, backend=take, fullgraph=True)
    assert caller(torch.ones(2)).tolist() == [3.0, 3.0]
    assert [node.op for node in graphs[0].graph.nodes].count("call_function") == 2


def test_marks_are_made_when_they_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[object] = []
    monkeypatch.setattr(torch.compiler, "allow_in_graph", marked.append)
    marks = DynamoMarks()

    def function() -> None: ...

    with marks.postponed():
        assert torch.compiler.allow_in_graph(function) is function
    assert marked == []
    marks.apply()
    marks.apply()
    assert marked == [function]


def test_checks_still_fail() -> None:
    with DynamoMarks().postponed(), pytest.raises(ValueError, match="too long"):
        torch._check_with(ValueError, False, lambda: "too long")
