"""Replacements of vLLM's names: only in one module, and refused where vLLM has another shape."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.upstream.uses import find_uses
from server.engine import launch
from server.frontend import LaunchError
from server.vllm import patches
from tests.architecture.source_tree import ROOT

OF_A_REQUEST = {
    "vllm.sampling_params.SamplingParams.extra_args",
    "vllm.sampling_params.SamplingParams.structured_outputs",
    "vllm.v1.engine.EngineCoreRequest.sampling_params.seed",
    "vllm.outputs.CompletionOutput.logprobs",
}
"""Fields of one request's parameters and results, which are data."""


# In a process of its own: other tests of this one replace names.
SCRIPT = """
import json

from pytest import MonkeyPatch
from vllm.v1.engine import output_processor

from server.frontend import LaunchError
from server.vllm import patches


def refusal():
    try:
        patches.check_shapes()
    except LaunchError as error:
        return str(error)


found = {"": refusal()}
for name in patches.SHAPES:
    with MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(name, lambda *, other: other)
        found[name] = refusal()
with MonkeyPatch.context() as monkeypatch:
    monkeypatch.delattr(output_processor.OutputProcessor, "process_outputs")
    found["gone"] = refusal()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refusals() -> dict[str, str | None]:
    """Refusals of a start by the name whose shape is another one; "" is vLLM as it is."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_this_vllm_is_the_one_that_the_replacements_are_for(
    refusals: dict[str, str | None],
) -> None:
    assert refusals[""] is None
    assert patches.vllm_build().version == patches.VERSION


@pytest.mark.parametrize("name", patches.SHAPES)
def test_a_start_is_refused_where_a_name_has_another_shape(
    refusals: dict[str, str | None], name: str
) -> None:
    refusal = refusals[name]
    assert refusal is not None
    assert name in refusal
    assert f"install vLLM {patches.VERSION}" in refusal


def test_a_start_is_refused_where_a_name_is_gone(refusals: dict[str, str | None]) -> None:
    assert "OutputProcessor.process_outputs" in str(refusals["gone"])


class Theirs:
    _apply_chat_template_async = tokenizer = None


class Ours(Theirs):
    pass


def test_an_object_becomes_one_of_a_subclass_of_its_class_alone() -> None:
    theirs: Any = Theirs()
    patches.use_tokenizer_type(theirs, Ours)
    assert type(theirs) is Ours
    copied: Any = patches.adapt_serving(Theirs(), Ours, lambda parser: parser)
    assert type(copied) is Ours
    other: Any = type("Other", (), {})()
    for refuse in (
        lambda: patches.use_tokenizer_type(other, Ours),
        lambda: patches.adapt_serving(other, Ours, lambda parser: parser),
        lambda: patches.use_template_renderer(other, Ours, None),
    ):
        with pytest.raises(LaunchError, match="install vLLM"):
            refuse()


@pytest.mark.slow
def test_nothing_is_replaced_in_another_module(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "server", tmp_path / "server")
    (tmp_path / "rbln_backend").mkdir()
    (tmp_path / "server/vllm/patches.py").unlink()
    settings = ("vllm.config.", "vllm.engine.arg_utils.")
    replaced = {name for name in find_uses(tmp_path).replaced if not name.startswith(settings)}
    assert replaced <= OF_A_REQUEST
    for path in (tmp_path / "server").rglob("*.py"):
        classes = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr == "__class__"
            and isinstance(node.ctx, ast.Store)
        ]
        assert not classes, path


def test_each_name_is_compared_once_at_a_start() -> None:
    parts = (launch._ENGINE_NAMES, launch._SERVING_NAMES)
    for name in patches.SHAPES:
        assert sum(name.startswith(part) for part in parts) == 1, name
