"""Drafts, right or wrong, change no token: only how many steps it takes to make them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from rbln_backend.speculation.drafter import DraftedRequest
from tests.adapters import make_adapter
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import run_ranks
from tests.engine.test_equality import make_prompts

pytestmark = pytest.mark.engine

LENGTH = 40
VOCAB = 512
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}


@dataclass
class Oracle:
    """Knows how texts go on, and lies now and then, about lengths as well."""

    texts: dict[tuple[int, ...], list[int]]
    lies: float
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    proposed: int = 0
    _going: dict[str, tuple[list[int], int]] = field(default_factory=dict)

    def begin(self, request: DraftedRequest) -> None:
        self._going[request.request_id] = (self.texts[tuple(request.prompt)], 0)

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        text, made = self._going[request_id]
        self._going[request_id] = (text, made + len(tokens))

    def propose(self, request_id: str, limit: int) -> list[int]:
        text, made = self._going[request_id]
        drafts = text[made : made + self.rng.randint(0, limit)]
        self.proposed += len(drafts)
        return [
            self.rng.randrange(VOCAB) if self.rng.random() < self.lies else token
            for token in drafts
        ]

    def end(self, request_id: str, finished: bool) -> None:
        del self._going[request_id]

    @property
    def holds_nothing(self) -> bool:
        return not self._going


@dataclass
class Pair:
    """An engine without speculation, and one that checks what an oracle says."""

    plain: Engine
    drafted: Engine

    def run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        lies: float,
        *,
        loras: list[LoRARequest | None] | None = None,
    ) -> Oracle:
        """Assert that both give the same; returns the oracle that was asked."""
        expected = _results(self.plain, prompts, params, loras)
        texts = {tuple(p): list(e[0]) for p, e in zip(prompts, expected, strict=True)}
        oracle = Oracle(texts, lies)
        drafting = self._runner._drafting
        own, drafting._drafter = drafting._drafter, oracle
        try:
            actual = _results(self.drafted, prompts, params, loras)
            # What ended with the last step is told with the next one.
            self.drafted.generate([[7]], SamplingParams(max_tokens=1, extra_args=OFF))
        finally:
            drafting._drafter = own
        _assert_same(actual, expected)
        assert oracle.holds_nothing
        assert self.drafted.used_blocks() == 0
        assert self.drafted.total("rbln_recompiles_after_warmup_total") == 0
        return oracle

    @property
    def _runner(self) -> Any:
        return self.drafted.core.model_executor.driver_worker.worker._runner

    def steps(self) -> float:
        """Decode steps of the engine with drafts."""
        return sum(
            self.drafted.total("rbln_bucket_steps_total", phase=phase)
            for phase in ("decode", "verify")
        )


WIDE_FAMILIES = ("mistral", "gpt_oss", "mixtral", "deepseek_v2", "bloom", "gemma2")
OFF = {"speculation": {"off": True}}


def _results(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    loras: list[LoRARequest | None] | None = None,
) -> list[tuple[Any, ...]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.generate(inputs, params, use_tqdm=False, lora_request=loras)
    return [_told(output.outputs[0]) for output in outputs]


def _told(completion: Any) -> tuple[Any, ...]:
    logprobs = completion.logprobs and [
        {token: (entry.logprob, entry.rank) for token, entry in place.items()}
        for place in completion.logprobs
    ]
    return tuple(completion.token_ids), completion.text, logprobs, completion.finish_reason


def _assert_same(actual: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    """Without pytest's comparison, which takes minutes for log-probabilities."""
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if ours != theirs:
            pytest.fail(f"request {number}: {ours[0]} {ours[3]}, not {theirs[0]} {theirs[3]}")


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True} | options)
    )


def seeded(seed: int, **options: Any) -> SamplingParams:
    return greedy(temperature=1.2, seed=seed, **options)


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Iterator[Pair]:
    drafted = engines.fresh("llama", speculative_config=NGRAM)
    yield Pair(engines("llama"), drafted)


@pytest.mark.parametrize("lies", [0.0, 0.2, 1.0])
def test_greedy_text_is_the_same(pair: Pair, lies: float) -> None:
    prompts = make_prompts([1, 17, 63, 130, 5, 200], seed=31)
    pair.run(prompts, [greedy(max_tokens=n) for n in (40, 33, 7, 40, 1, 40)], lies)


def test_right_drafts_save_steps(pair: Pair) -> None:
    (prompt,) = make_prompts([20], seed=32)
    before = pair.steps()
    pair.run([prompt], [greedy()], lies=0.0)
    assert pair.steps() - before < LENGTH * 0.6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 9, "top_p": 0.9},
        {"min_p": 0.05, "logprobs": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
        {"logit_bias": {42: 3.0}, "min_tokens": 11, "stop_token_ids": list(range(200))},
        {"bad_words": ["the"], "prompt_logprobs": 1},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("make", [lambda n, **o: greedy(**o), seeded], ids=["greedy", "seeded"])
def test_every_way_of_sampling_gives_the_same(pair: Pair, make: Any, options: Any) -> None:
    prompts = make_prompts([9, 30, 64], seed=33)
    pair.run(prompts, [make(n, **options) for n in range(3)], lies=0.15)


def test_different_ways_in_one_batch(pair: Pair) -> None:
    prompts = make_prompts([5, 40, 70, 12], seed=34)
    params = [
        seeded(1, presence_penalty=0.5),
        greedy(logprobs=2),
        seeded(2, top_k=5),
        greedy(min_tokens=9, stop_token_ids=[3, 4, 5]),
    ]
    pair.run(prompts, params, lies=0.1)


def test_a_grammar_cuts_drafts(pair: Pair) -> None:
    prompts = make_prompts([12, 25, 33], seed=35)
    rules = StructuredOutputsParams(regex=r"([a-z]{1,4} ){3,30}")
    params = [
        seeded(3, structured_outputs=rules, ignore_eos=False),
        greedy(structured_outputs=rules, ignore_eos=False),
        seeded(4),
    ]
    pair.run(prompts, params, lies=0.2)


def test_a_request_can_do_without(pair: Pair) -> None:
    (prompt,) = make_prompts([20], seed=36)
    oracle = pair.run([prompt], [greedy(extra_args=OFF)], lies=0.0)
    assert oracle.proposed == 0


def test_the_text_of_the_request_itself_is_drafted(pair: Pair) -> None:
    """No oracle: n-grams."""
    prompts = [make_prompts([12], seed=37)[0] * 4]
    params = [greedy(logit_bias={prompts[0][0]: 50.0})]
    before = pair.steps()
    _assert_same(_results(pair.drafted, prompts, params), _results(pair.plain, prompts, params))
    assert pair.steps() - before < LENGTH * 0.6


@pytest.mark.parametrize(
    "arch", ["gemma3_text", *(pytest.param(a, marks=pytest.mark.wide) for a in WIDE_FAMILIES)]
)
def test_other_layers_give_the_same(engines: Engines, arch: str) -> None:
    """Windows, which keep their whole context where drafts are checked, experts and others."""
    other = Pair(engines(arch), engines.fresh(arch, speculative_config=NGRAM))
    prompts = make_prompts([5, 40, 130], seed=40)
    other.run(prompts, [greedy(), seeded(1), greedy(logprobs=1)], lies=0.15)


def test_preemption_and_prefix_hits_change_nothing(engines: Engines) -> None:
    """Too few blocks for four requests, and twice the same prompts."""
    short = Pair(
        engines("llama"),
        engines.fresh("llama", speculative_config=NGRAM, num_gpu_blocks_override=30),
    )
    preempted: list[str] = []
    scheduler = short.drafted.core.scheduler
    preempt = scheduler._preempt_request

    def counting(request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **options)

    scheduler._preempt_request = counting
    prompts = make_prompts([100, 101, 102, 103], seed=41)
    params = [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy(logprobs=1)]
    for _ in range(2):
        short.run(prompts, params, lies=0.1)
    assert preempted


def test_adapters_have_drafts_of_their_own_texts(engines: Engines, tmp_path: Path) -> None:
    plain = engines.fresh("llama", enable_lora=True, max_loras=2)
    adapter = make_adapter(plain.checkpoint, tmp_path / "adapter")
    both = Pair(
        plain, engines.fresh("llama", enable_lora=True, max_loras=2, speculative_config=NGRAM)
    )
    prompts = make_prompts([20, 20, 33], seed=42)
    loras = [LoRARequest("a", 1, str(adapter)), None, LoRARequest("a", 1, str(adapter))]
    params = [greedy(), greedy(), seeded(1)]
    oracle = both.run(prompts, params, lies=0.1, loras=loras)
    assert oracle.proposed
    assert _results(plain, prompts, params) != _results(plain, prompts, params, loras)


@pytest.mark.wide
def test_two_ranks_check_what_one_drafts(engines: Engines, tmp_path: Path) -> None:
    prompts = [make_prompts([12], seed=37)[0] * 4, make_prompts([40], seed=43)[0]]
    expected = _results(engines("llama"), prompts, [greedy()] * 2)
    answers = run_ranks(
        engines("llama").checkpoint,
        tmp_path,
        prompts,
        tensor_parallel_size=2,
        speculative_config=NGRAM | {"prompt_lookup_min": 1},
    )
    for answer, told in zip(answers, expected, strict=True):
        assert answer["tokens"] == list(told[0])[: len(answer["tokens"])]


def test_a_stop_string_ends_the_same_text(pair: Pair) -> None:
    (prompt,) = make_prompts([20], seed=44)
    text = _results(pair.plain, [prompt], [greedy()])[0][1]
    params = [greedy(stop=[text[len(text) // 2 :][:2]])]
    ours, theirs = (_results(e, [prompt], params)[0] for e in (pair.drafted, pair.plain))
    assert (ours[1], ours[3]) == (theirs[1], theirs[3])
    assert theirs[3] == "stop"
