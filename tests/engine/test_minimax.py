"""MiniMax-M2.7 as the vendor deploys it, small, on ranks of the emulated device."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.graph_cache import graph_cache
from tests.minimax_checkpoint import AS_DEPLOYED, LAYERS, PROMPTS, make_minimax

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.timeout(900)]

# Sums over ranks are taken in another order, and can end on the other side of a cache's rounding.
ROUNDING = 0.1


@pytest.fixture(scope="module")
def engine(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = make_minimax(tmp_path_factory.mktemp("minimax") / "fp8")
    return engines.fresh(checkpoint=path, **AS_DEPLOYED)


@pytest.mark.parametrize("stages", [2, LAYERS])
def test_stages_answer_as_one_rank(engine: Engine, stages: int) -> None:
    options = AS_DEPLOYED | {"pipeline_parallel_size": stages}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, 0.0)


def test_four_engines_that_share_experts_answer_as_one(engine: Engine) -> None:
    options = AS_DEPLOYED | {"enable_expert_parallel": True, "data_parallel_size": 4}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, ROUNDING)
