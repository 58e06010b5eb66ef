"""Drafts, right or wrong, change no token: only how many steps it takes to make them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from rbln_backend.graphs.bundles import collect, write_folder
from tests.adapters import make_adapter
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import run_ranks
from tests.engine.support import (
    FEW,
    FEWER,
    MOST,
    AnyLength,
    Oracle,
    SteadyTimes,
    Stepped,
    make_prompts,
)

pytestmark = pytest.mark.engine

LENGTH = 40
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": MOST}
RESULTS = ("compiled", "loaded")
OFF = {"speculation": {"off": True}}
WIDE_FAMILIES = ("mistral", "gpt_oss", "mixtral", "deepseek_v2", "bloom", "gemma2")


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
        least: int = 1,
        expected: list[tuple[Any, ...]] | None = None,
        loras: list[LoRARequest | None] | None = None,
    ) -> Oracle:
        """Assert that both give the same, with steps of ``least`` tokens; returns the oracle."""
        expected = expected or results(self.plain, prompts, params)
        with self.asking(Oracle(texts_of(prompts, expected), lies), AnyLength(least)) as oracle:
            actual = results(self.drafted, prompts, params, loras)
        assert_same(actual, expected)
        return oracle

    @contextmanager
    def asking(self, oracle: Oracle, lengths: AnyLength) -> Iterator[Oracle]:
        """Within it the drafts are the oracle's; afterwards nothing is left of its requests."""
        drafting = self._drafting
        own = drafting._drafter, drafting._budget
        drafting._drafter, drafting._budget = oracle, lengths
        try:
            yield oracle
            # The next scheduler output names the requests that ended with the last step.
            self.drafted.generate([[7]], SamplingParams(max_tokens=1, extra_args=OFF))
        finally:
            drafting._drafter, drafting._budget = own
        assert oracle.holds_nothing
        assert self.drafted.used_blocks() == 0
        assert self.drafted.total("rbln_recompiles_after_warmup_total") == 0

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Within it drafts cost the same on every machine, however busy."""
        drafting, own = self._drafting, self._drafting._budget
        drafting._budget = SteadyTimes()
        try:
            yield
        finally:
            drafting._budget = own

    @property
    def _drafting(self) -> Any:
        return self.drafted.core.model_executor.driver_worker.worker._runner._drafting

    def steps(self) -> float:
        return sum(
            self.drafted.total("rbln_bucket_steps_total", phase=phase)
            for phase in ("decode", "verify")
        )


def results(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    loras: list[LoRARequest | None] | None = None,
) -> list[tuple[Any, ...]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.generate(inputs, params, use_tqdm=False, lora_request=loras)
    return [outcome(output.outputs[0]) for output in outputs]


def outcome(completion: Any) -> tuple[Any, ...]:
    logprobs = completion.logprobs and [
        {token: (entry.logprob, entry.rank) for token, entry in place.items()}
        for place in completion.logprobs
    ]
    return tuple(completion.token_ids), completion.text, logprobs, completion.finish_reason


def texts_of(
    prompts: list[list[int]], expected: list[tuple[Any, ...]]
) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): list(e[0]) for p, e in zip(prompts, expected, strict=True)}


def assert_same(actual: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
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
def pair(engines: Engines) -> Pair:
    """With slots for adapters, and too few blocks for four long requests."""
    lora = {"enable_lora": True, "max_loras": 2}
    drafted = engines.fresh(
        "llama", rbln=FEW, speculative_config=SUFFIX, num_gpu_blocks_override=34, **lora
    )
    return Pair(engines("llama"), drafted)


@pytest.mark.parametrize("lies", [0.0, 0.2, 1.0])
def test_greedy_text_is_the_same(pair: Pair, lies: float) -> None:
    prompts = make_prompts([1, 17, 63, 130, 5, 200], seed=31)
    pair.run(prompts, [greedy(max_tokens=n) for n in (40, 33, 7, 40, 1, 40)], lies)


def test_right_drafts_save_steps(pair: Pair) -> None:
    (prompt,) = make_prompts([20], seed=32)
    before = pair.steps()
    pair.run([prompt], [greedy()], lies=0.0, least=MOST + 1)
    assert pair.steps() - before < LENGTH * 0.6


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 9, "top_p": 0.9},
    {"min_p": 0.05, "logprobs": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
    {"logit_bias": {42: 3.0}, "min_tokens": 11, "stop_token_ids": [*range(0, 4096, 2)]},
    {"bad_words": ["the"], "prompt_logprobs": 1},
    {"presence_penalty": 0.5},
    {"allowed_token_ids": [*range(300, 340)]},
)


def test_every_way_of_sampling_gives_the_same(pair: Pair) -> None:
    """Each alone first, for some are sampled in ways that a mixed batch is not; then together."""
    params = [greedy(**way) for way in WAYS] + [seeded(n, **way) for n, way in enumerate(WAYS)]
    prompts = make_prompts([5 + 4 * n for n in range(len(params))], seed=33)
    together = results(pair.plain, prompts, params)
    pair.run(prompts, params, lies=0.1, expected=together)
    for number in (0, 2, 3, 9):
        alone = slice(number, number + 1)
        pair.run(prompts[alone], params[alone], lies=0.1, expected=together[alone])


def test_a_minimum_length_can_be_reached_by_drafts(pair: Pair) -> None:
    """Whichever draft of a step reaches it: the token after that may end the text, and does."""
    prompts = make_prompts([9] * 12, seed=39)
    texts = [whole[0] for whole in results(pair.plain, prompts, [greedy(max_tokens=24)] * 12)]
    ends = [max(n for n, token in enumerate(text) if token not in text[:n]) for text in texts]
    assert sum(end > MOST for end in ends) >= 6, "texts that repeat one token end nowhere"
    params = [
        greedy(min_tokens=end, stop_token_ids=[text[end]])
        for end, text in zip(ends, texts, strict=True)
    ]
    expected = results(pair.plain, prompts, params)
    assert {reason for *_, reason in expected} == {"stop"}
    pair.run(prompts, params, lies=0.0, least=MOST + 1, expected=expected)


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


def test_texts_are_drafted_where_they_repeat(pair: Pair) -> None:
    """No oracle, and lengths as they pay: the request's own text, then an answer like it."""
    prompts = [make_prompts([12], seed=37)[0] * 4]
    params = [greedy(logit_bias={prompts[0][0]: 50.0})]
    before = pair.steps()
    with pair.steady():
        drafted = results(pair.drafted, prompts, params)
    assert_same(drafted, results(pair.plain, prompts, params))
    assert pair.steps() - before < LENGTH * 0.6
    assert pair.drafted.total("rbln_draft_gain_total") > 0


def test_finished_answers_are_drafts_for_their_owner_alone(pair: Pair) -> None:
    prompts = make_prompts([30], seed=38)
    expected = results(pair.plain, prompts, [greedy()])
    taken = []
    for key in ("a", "a", "b"):
        before = pair.steps()
        params = [greedy(extra_args={"speculation": {"key": key}})]
        with pair.steady():
            assert_same(results(pair.drafted, prompts, params), expected)
        taken.append(pair.steps() - before)
    assert taken[1] < 0.8 * min(taken[0], taken[2]), taken


def test_adapters_have_drafts_of_their_own_texts(pair: Pair, tmp_path: Path) -> None:
    adapter = make_adapter(pair.drafted.checkpoint, tmp_path / "adapter")
    prompts = make_prompts([20, 20, 33], seed=42)
    loras = [LoRARequest("a", 1, str(adapter)), None, LoRARequest("a", 1, str(adapter))]
    plain = [greedy(extra_args=OFF), greedy(extra_args=OFF), seeded(1, extra_args=OFF)]
    expected = results(pair.drafted, prompts, plain, loras)
    params = [greedy(), greedy(), seeded(1)]
    oracle = pair.run(prompts, params, lies=0.1, loras=loras, expected=expected)
    assert oracle.proposed
    assert results(pair.plain, prompts, params)[0] != expected[0]


def test_preemption_and_prefix_hits_change_nothing(pair: Pair) -> None:
    """Twice the same prompts."""
    preempted: list[str] = []
    scheduler = pair.drafted.core.scheduler
    preempt = scheduler._preempt_request

    def counting(request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **options)

    scheduler._preempt_request = counting
    prompts = make_prompts([100, 101, 102, 103], seed=41)
    params = [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy(logprobs=1)]
    for _ in range(2):
        pair.run(prompts, params, lies=0.1)
    scheduler._preempt_request = preempt
    assert preempted


class Crowd(Stepped):
    """Requests that come at any time, some of which are aborted."""

    def play(
        self, prompts: list[list[int]], params: list[SamplingParams], rng: random.Random
    ) -> None:
        waiting = list(enumerate(zip(prompts, params, strict=True)))
        while waiting or self.going:
            if waiting and (not self.going or rng.random() < 0.4):
                number, request = waiting.pop(0)
                self.add(str(number), *request)
            self.step()
            if self.going and rng.random() < 0.08:
                self.abort(rng.choice(self.going))

    def assert_got(self, expected: list[tuple[Any, ...]]) -> None:
        """Assert whole answers, the beginnings of those that were aborted; of these there are."""
        for number, whole in enumerate(expected):
            if (name := str(number)) in self.requests:
                assert_same([outcome(self.outputs[name].outputs[0])], [whole])
            tokens = self.tokens[name]
            assert tuple(tokens) == whole[0][: len(tokens)]
        assert len(self.requests) < len(expected)


@pytest.fixture(scope="module")
def crowd(pair: Pair) -> tuple[Any, ...]:
    prompts = make_prompts([1, 90, 33, 100, 64, 7, 110, 48], seed=45)
    params = [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy(logprobs=1)] * 2
    return prompts, params, results(pair.plain, prompts, params)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.wide) for n in range(2, 20))]
)
def test_any_drafts_at_any_length_with_aborts(
    pair: Pair, crowd: tuple[Any, ...], seed: int
) -> None:
    prompts, params, expected = crowd
    rng = random.Random(seed)
    oracle = Oracle(texts_of(prompts, expected), rng.random() / 2, rng)
    requests = Crowd(pair.drafted)
    with pair.asking(oracle, AnyLength(rng=rng)):
        requests.play(prompts, params, rng)
    requests.assert_got(expected)


def test_a_stop_string_ends_the_same_text(pair: Pair) -> None:
    (prompt,) = make_prompts([20], seed=44)
    text = results(pair.plain, [prompt], [greedy()])[0][1]
    params = [greedy(stop=[text[len(text) // 2 :][:2]])]
    ours, theirs = (results(e, [prompt], params)[0] for e in (pair.drafted, pair.plain))
    assert (ours[1], ours[3]) == (theirs[1], theirs[3])
    assert theirs[3] == "stop"


def test_a_bundle_holds_the_graphs_that_check_drafts(engines: Engines, tmp_path: Path) -> None:
    """A chunk, a step of 4 requests and one with drafts of each, and the LM head."""
    checkpoint, bundle = engines.checkpoints("llama", num_hidden_layers=1), tmp_path / "bundle"

    def made(root: Path, *bundles: str) -> list[float]:
        rbln = FEWER | {"cache_root": str(root), "cache_bundles": [*bundles]}
        engine = engines.fresh(checkpoint=checkpoint, rbln=rbln, speculative_config=SUFFIX)
        return [engine.total("rbln_compile_seconds_count", result=how) for how in RESULTS]

    assert made(tmp_path / "one") == [4, 0]
    write_folder(bundle, collect(tmp_path / "one", lambda *_: None, kernel_keys=()))
    assert made(tmp_path / "two", str(bundle)) == [0, 4]


@pytest.mark.parametrize(
    "arch", ["gemma3_text", *(pytest.param(a, marks=pytest.mark.wide) for a in WIDE_FAMILIES)]
)
def test_other_layers_give_the_same(engines: Engines, arch: str) -> None:
    """Windows, which keep their whole context where drafts are checked, experts and others."""
    drafted = engines.fresh(arch, speculative_config=NGRAM, rbln=FEWER)
    prompts = make_prompts([5, 40, 130], seed=40)
    params = [greedy(), seeded(1), greedy(logprobs=1)]
    Pair(engines(arch), drafted).run(prompts, params, lies=0.15)


@pytest.mark.wide
def test_two_ranks_check_what_one_drafts(engines: Engines, tmp_path: Path) -> None:
    prompts = [make_prompts([12], seed=37)[0] * 4, make_prompts([40], seed=43)[0]]
    expected = results(engines("llama"), prompts, [greedy()] * 2)
    answers = run_ranks(
        engines("llama").checkpoint,
        tmp_path,
        prompts,
        tensor_parallel_size=2,
        speculative_config=NGRAM | {"prompt_lookup_min": 1},
    )
    for answer, whole in zip(answers, expected, strict=True):
        assert answer["tokens"] == list(whole[0])[: len(answer["tokens"])]
