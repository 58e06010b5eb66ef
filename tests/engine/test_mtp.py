"""A checkpoint's own MTP layer changes no token, in every family that has one here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.conftest import Engine, Engines
from tests.engine.support import MOST, AnyLength, make_prompts
from tests.engine.test_draft_models import GREEDY, PROMPTS, Drafted, record_drafts
from tests.engine.test_speculation import FEW, OFF, WAYS, greedy, results, seeded
from tests.mtp_checkpoints import MTP_LAYERS, MtpMaker

pytestmark = pytest.mark.engine

MTP = {"method": "mtp", "num_speculative_tokens": MOST}
WIDE = ("ernie4_5_moe", "mimo")


@dataclass
class MtpFamilyRun:
    """An engine without the layer and one with a fitted layer, of one family."""

    pair: Drafted
    maker: MtpMaker


def start(engines: Engines, own: Path, **options: Any) -> Engine:
    """With too few blocks for four long requests."""
    options = {"rbln": FEW, "num_gpu_blocks_override": 34, "disable_log_stats": False} | options
    return engines.fresh(checkpoint=own, speculative_config=MTP, **options)


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.wide] * (n in WIDE)) for n in MTP_LAYERS],
)
def family(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[MtpFamilyRun]:
    maker, folder = MtpMaker(request.param, engines.checkpoints), tmp_path_factory.mktemp("mtp")
    plain = engines(maker.family.served)
    answers = results(plain, PROMPTS, GREEDY)
    texts = [prompt + list(answer[0]) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    own = maker.fitted(folder, texts, last=41)
    yield MtpFamilyRun(Drafted(plain, start(engines, own), "mtp"), maker)


def test_greedy_answers_are_the_same_in_fewer_steps(family: MtpFamilyRun) -> None:
    family.pair.assert_fewer_steps(0.5)


def test_every_way_of_sampling_and_grammars_give_the_same(family: MtpFamilyRun) -> None:
    pair = family.pair
    pair.check(AnyLength())
    params = [greedy(**way) for way in WAYS] + [seeded(n, **way) for n, way in enumerate(WAYS)]
    rules = StructuredOutputsParams(regex=r"([a-z]{1,4} ){3,30}")
    (answer,) = results(pair.plain, PROMPTS[1:2], GREEDY[1:2])
    params += [
        seeded(3, structured_outputs=rules, ignore_eos=False),
        greedy(max_tokens=33, extra_args={"speculation": {"prediction": answer[0]}}),
        greedy(extra_args=OFF),
    ]
    pair.run(make_prompts([5 + 4 * n for n in range(len(params))], seed=33), params)


def test_preemption_prefix_hits_and_the_end_of_the_context(family: MtpFamilyRun) -> None:
    family.pair.assert_same_after_preemption_and_hits()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 6))]
)
def test_requests_that_come_and_are_aborted(family: MtpFamilyRun, seed: int) -> None:
    family.pair.assert_same_with_aborts(random.Random(seed))


def test_drafts_are_those_of_the_whole_text(
    engines: Engines, family: MtpFamilyRun, tmp_path: Path
) -> None:
    """Of a random layer: after chunks, after drafts that were wrong, and after hits."""
    own = family.maker.random(tmp_path)
    wrong = Drafted(family.pair.plain, start(engines, own), "mtp")
    wrong.check(AnyLength())
    seen = record_drafts(wrong)
    prompts, params = make_prompts([130, 70, 9], seed=47), [greedy(max_tokens=12)] * 3
    for _ in range(2):
        wrong.run(prompts, params)
    assert len(seen) > 30
    for text, drafts in random.Random(8).sample(seen, 12) + seen[:3] + seen[-3:]:
        assert drafts == family.maker.drafts(own, text, MOST)
    assert wrong.share() < 0.1
    # Graphs of a start like it: weights are no part of them.
    assert wrong.own.total("rbln_compile_seconds_count", result="compiled") == 0
