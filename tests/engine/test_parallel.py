"""Several ranks say what one says: tensor, pipeline and data parallel, alone and together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.test_equality import make_prompts
from tests.graph_cache import graph_cache

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# A token, blocks and chunks to both sides of their ends; more prompts than a step takes.
PROMPTS = make_prompts([1, 17, 64, 65, 130, 200], seed=500)
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
DATA: dict[str, Any] = {"data_parallel_size": 2}
# Ranks add up their parts of a sum; stages and engines compute what one rank computes.
ROUNDING, NONE = 1e-4, 0.0
wide = pytest.mark.wide


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (TENSOR, ROUNDING),
        pytest.param(TENSOR | {"async_scheduling": True}, ROUNDING, marks=wide),
        pytest.param(PIPELINE, NONE, marks=wide),
        pytest.param(TENSOR | PIPELINE, ROUNDING, marks=wide),
        pytest.param(DATA, NONE, marks=wide),
        pytest.param(TENSOR | DATA, ROUNDING, marks=wide),
        pytest.param(PIPELINE | DATA, NONE, marks=wide),
    ],
)
def test_ranks_say_what_one_says(
    engines: Engines, options: dict[str, Any], tolerance: float
) -> None:
    engine = engines("llama")
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, tolerance)


@pytest.mark.wide
@pytest.mark.parametrize("options", [TENSOR, PIPELINE])
@pytest.mark.parametrize("arch", ["qwen3", "exaone4"])
def test_other_layers(engines: Engines, arch: str, options: dict[str, Any]) -> None:
    """Norms over heads; sliding windows in some layers, which may all lie in one stage."""
    engine = engines(arch)
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, ROUNDING)


@pytest.mark.wide
def test_without_kernels_ranks_talk_through_torch(engines: Engines) -> None:
    engine = engines("llama")
    plain = {"additional_config": {"rbln": {"num_threads": 1, "kernels": "aten"}}}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS[:3], **TENSOR, **plain)
    assert_as_one_rank(engine, PROMPTS[:3], answers, ROUNDING)


@pytest.mark.wide
@pytest.mark.parametrize("options", [TENSOR, PIPELINE])
def test_a_store_that_lacks_graphs_of_one_rank(
    engines: Engines, tmp_path: Path, options: dict[str, Any]
) -> None:
    """As a start leaves it that was killed: ranks have not come equally far."""
    engine = engines("llama")
    prompts = PROMPTS[:3]
    run_ranks(engine.checkpoint, tmp_path, prompts, **options)
    stored = artifacts(tmp_path)
    for artifact in stored[::3]:
        shutil.rmtree(artifact)
    answers = run_ranks(engine.checkpoint, tmp_path, prompts, **options)
    assert_as_one_rank(engine, prompts, answers, ROUNDING)
    assert artifacts(tmp_path) == stored


def artifacts(cache_root: Path) -> list[Path]:
    return sorted(path.parent for path in (cache_root / "rbln" / "graphs").rglob("manifest.json"))
