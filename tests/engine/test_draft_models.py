"""Draft models change no token: fitted heads, which are often right, and random ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams

from rbln_backend.errors import UnsupportedModelError
from tests.draft_checkpoints import fitted_medusa, random_medusa, write_medusa
from tests.engine.conftest import Engine, Engines
from tests.engine.oracle import MOST, AnyLength
from tests.engine.test_equality import make_prompts
from tests.engine.test_speculation import (
    FEW,
    OFF,
    WAYS,
    Crowd,
    assert_same,
    greedy,
    results,
    seeded,
)

pytestmark = pytest.mark.engine

PROMPTS = make_prompts([1, 17, 63, 130, 5, 200], seed=31)
GREEDY = [greedy(max_tokens=n) for n in (40, 33, 7, 40, 1, 40)]


@dataclass
class Drafted:
    """An engine without speculation, and one with a draft model."""

    plain: Engine
    own: Engine

    def check(self, lengths: AnyLength) -> None:
        """Check drafts at ``lengths``, whatever they gain."""
        self._drafting._chooser = lengths

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        """Assert that both engines give the same, and that nothing is left of the requests."""
        assert_same(results(self.own, prompts, params), results(self.plain, prompts, params))
        self.assert_idle()

    def assert_idle(self) -> None:
        """Assert that the engine holds nothing of any request, and has compiled nothing late."""
        self.own.generate([[7]], SamplingParams(max_tokens=1))
        assert len(self._drafting._model._drafts) <= 1
        assert self.own.used_blocks() == 0
        assert self.own.total("rbln_recompiles_after_warmup_total") == 0

    def share(self) -> float:
        """Return the share of checked drafts that were accepted so far."""
        accepted = self.own.total("rbln_draft_accepted_tokens_total")
        return accepted / self.own.total("rbln_draft_tokens_total")

    def steps(self) -> float:
        """Return the decode steps of the engine with drafts."""
        phases = ("decode", "verify")
        return sum(self.own.total("rbln_bucket_steps_total", phase=phase) for phase in phases)

    @property
    def _drafting(self) -> Any:
        return self.own.core.model_executor.driver_worker.worker._runner._drafting


@pytest.fixture(scope="module")
def texts(engines: Engines) -> list[list[int]]:
    answers = results(engines("llama"), PROMPTS, GREEDY)
    return [prompt + list(answer[0]) for prompt, answer in zip(PROMPTS, answers, strict=True)]


@pytest.fixture(scope="module")
def medusa(
    engines: Engines, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Drafted:
    plain = engines("llama")
    heads = fitted_medusa(tmp_path_factory.mktemp("medusa"), plain.checkpoint, texts)
    return Drafted(plain, start(engines, heads))


def start(engines: Engines, heads: Path, **options: Any) -> Engine:
    """With too few blocks for four long requests."""
    speculation = {"method": "medusa", "model": str(heads), "num_speculative_tokens": MOST}
    options = {"rbln": FEW, "num_gpu_blocks_override": 34, "disable_log_stats": False} | options
    return engines.fresh("llama", speculative_config=speculation, **options)


def test_greedy_answers_are_the_same_in_fewer_steps(medusa: Drafted) -> None:
    medusa.check(AnyLength(MOST + 1))
    medusa.run(PROMPTS, GREEDY)
    assert medusa.share() > 0.2
    # One after the other: a prefill, and without drafts 39 decode steps.
    before = medusa.steps()
    medusa.run(PROMPTS[3:4], GREEDY[3:4])
    assert medusa.steps() - before < 36


def test_every_way_of_sampling_gives_the_same(medusa: Drafted) -> None:
    medusa.check(AnyLength())
    params = [greedy(**way) for way in WAYS] + [seeded(n, **way) for n, way in enumerate(WAYS)]
    medusa.run(make_prompts([5 + 4 * n for n in range(len(params))], seed=33), params)


def test_grammars_predictions_and_requests_without_drafts(medusa: Drafted) -> None:
    medusa.check(AnyLength(MOST + 1))
    rules = StructuredOutputsParams(regex=r"([a-z]{1,4} ){3,30}")
    (answer,) = results(medusa.plain, PROMPTS[1:2], GREEDY[1:2])
    params = [
        seeded(3, structured_outputs=rules, ignore_eos=False),
        greedy(max_tokens=33, extra_args={"speculation": {"prediction": answer[0]}}),
        greedy(extra_args=OFF),
        seeded(4),
    ]
    medusa.run([PROMPTS[2], PROMPTS[1], PROMPTS[3], PROMPTS[5]], params)


def test_preemption_prefix_hits_and_the_end_of_the_context(medusa: Drafted) -> None:
    """Twice the same prompts; the last answer ends with the context."""
    medusa.check(AnyLength())
    prompts = [*make_prompts([100, 101, 102, 103], seed=41), *make_prompts([250], seed=46)]
    params = [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy(logprobs=1), greedy()]
    for _ in range(2):
        medusa.run(prompts, params)
    counted = {metric.name: metric for metric in medusa.own.llm.get_metrics()}
    assert counted["vllm:num_preemptions"].value > 0
    assert counted["vllm:prefix_cache_hits"].value > 0


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 12))]
)
def test_requests_that_come_and_are_aborted(medusa: Drafted, seed: int) -> None:
    rng = random.Random(seed)
    params = [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy(logprobs=1)] * 2
    prompts = make_prompts([1, 90, 33, 100, 64, 7, 110, 48], seed=45)
    crowd = Crowd(prompts, params, rng)
    medusa.check(AnyLength(rng=rng))
    crowd.run(medusa.own.llm.llm_engine)
    crowd.assert_got(results(medusa.plain, prompts, params))
    medusa.assert_idle()
    assert crowd.aborted


def test_counts_of_vllm_agree(medusa: Drafted) -> None:
    medusa.run(PROMPTS, GREEDY)
    theirs = {metric.name: metric for metric in medusa.own.llm.get_metrics()}
    ours = {"draft_tokens": "rbln_draft_tokens", "accepted_tokens": "rbln_draft_accepted_tokens"}
    for name, own in ours.items():
        counted = theirs[f"vllm:spec_decode_num_{name}"].value
        assert counted == medusa.own.total(f"{own}_total") > 0
    places = theirs["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert sum(places) == theirs["vllm:spec_decode_num_accepted_tokens"].value
    assert places == sorted(places, reverse=True)


def test_wrong_drafts_cost_steps_no_tokens(
    engines: Engines, medusa: Drafted, tmp_path: Path
) -> None:
    heads = random_medusa(tmp_path, medusa.plain.checkpoint)
    drafted = Drafted(medusa.plain, start(engines, heads))
    drafted.check(AnyLength(MOST + 1))
    drafted.run(PROMPTS, [*GREEDY[:3], seeded(1), *GREEDY[4:]])
    assert drafted.share() < 0.1
    assert drafted.own.metric("rbln_compile_seconds_count", kind="draft", result="loaded") == 2


def test_a_checkpoint_with_fewer_heads_is_refused(
    engines: Engines, medusa: Drafted, tmp_path: Path
) -> None:
    heads = random_medusa(tmp_path, medusa.plain.checkpoint, heads=MOST - 1)
    with pytest.raises(
        UnsupportedModelError, match=r"num_speculative_tokens 3: .*(blocks|lm_heads)\.2"
    ):
        start(engines, heads)


def test_every_engine_of_several_is_refused(engines: Engines, tmp_path: Path) -> None:
    settings = {
        "method": "medusa",
        "model": str(write_medusa(tmp_path)),
        "num_speculative_tokens": 2,
    }
    arguments = EngineArgs(
        str(engines.checkpoints("llama")), data_parallel_size=2, speculative_config=settings
    )
    with pytest.raises(
        ValueError, match="method 'medusa' with data_parallel_size 2: a draft model"
    ):
        arguments.create_engine_config()
