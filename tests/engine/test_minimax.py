"""MiniMax-M2.7 as the vendor deploys it, small, on ranks of the emulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.eagle3_checkpoints import fitted_eagle3
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import NUM_TOKENS, assert_as_one_rank, run_ranks
from tests.engine.test_draft_models import speculation_of
from tests.graph_cache import graph_cache
from tests.minimax_checkpoint import AS_DEPLOYED, CACHE_SCALES, LAYERS, PROMPTS, make_minimax

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


def test_stages_with_eagle3(engine: Engine, tmp_path: Path) -> None:
    """Hidden states of the first layers pass two stages to the draft model in the last one."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, params)]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    plain = engine.checkpoint / "plain"
    own = fitted_eagle3(tmp_path / "own", plain, texts, last=34, cache_scales=CACHE_SCALES)
    (run_dir := tmp_path / "run").mkdir()
    options = AS_DEPLOYED | {
        "pipeline_parallel_size": LAYERS,
        "speculative_config": speculation_of("eagle3", own),
        "additional_config": {"rbln": {"num_threads": 1, "run_dir": str(run_dir)}},
    }
    drafted = run_ranks(
        *(engine.checkpoint, graph_cache(), PROMPTS), checks_all_drafts=True, **options
    )
    assert_as_one_rank(engine, PROMPTS, drafted, 0.0)
    counts = Engine(None, run_dir, engine.checkpoint)
    checked = counts.total("rbln_draft_tokens_total")
    assert counts.total("rbln_draft_accepted_tokens_total") > 0.3 * checked > 0


def test_two_ranks_answer_as_one(engine: Engine) -> None:
    options = AS_DEPLOYED | {"tensor_parallel_size": 2}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, ROUNDING)


def test_four_engines_that_share_experts_answer_as_one(engine: Engine) -> None:
    options = AS_DEPLOYED | {"enable_expert_parallel": True, "data_parallel_size": 4}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, ROUNDING)
