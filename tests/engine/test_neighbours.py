"""Requests that come and go in any order change no answer: each is the answer alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.adapters import make_adapter
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.engine.test_lora import LORA
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

MASKED = {"allowed_token_ids": [300, 301, 302]}
FEATURES: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": [*range(20, 90)], "logprobs": 2},
    {"bad_words": ["the", "a"]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"presence_penalty": 1.5, "logprobs": 0},
    {"logit_bias": {42: 3.0, 99: 2.5}},
    {"min_tokens": 9, "stop_token_ids": [*range(0, 4096, 2)]},
    {"min_p": 0.2, "temperature": 0.8, "seed": 4},
    {"top_k": 7, "temperature": 1.2, "seed": 5},
    {"top_p": 0.7, "temperature": 1.2, "seed": 6, "logprobs": 3},
    {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{9}"}, "ignore_eos": False},
    {"structured_outputs": {"choice": ["red", "green"]}, "temperature": 1.0, "seed": 7},
    {"prompt_logprobs": 1},
    {"logprob_token_ids": [7, 300, 12, 9]},
    {"logprob_token_ids": [5], "temperature": 0.9, "seed": 8},
)


class Company:
    """Requests of an engine that is stepped by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._core = engine.llm.llm_engine
        self.answers: dict[str, Any] = {}
        self.going: set[str] = set()

    def add(
        self,
        name: str,
        prompt: list[int],
        options: dict[str, Any],
        adapter: LoRARequest | None = None,
    ) -> None:
        options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options
        if rules := options.pop("structured_outputs", None):
            options["structured_outputs"] = StructuredOutputsParams(**rules)
        params, inputs = SamplingParams(**options), {"prompt_token_ids": prompt}
        self._core.add_request(name, inputs, params, lora_request=adapter)
        self.going.add(name)

    def abort(self, name: str) -> None:
        self._core.abort_request([name])
        self.going.discard(name)

    def step(self) -> None:
        for output in self._core.step():
            self.answers[output.request_id] = said(output)
            if output.finished:
                self.going.discard(output.request_id)

    def to_the_end(self) -> None:
        while self.going:
            self.step()
        assert self.engine.used_blocks() == 0


def said(output: Any) -> tuple[Any, ...]:
    (completion,) = output.outputs
    places = [
        *(completion.logprobs or ()),
        *(place or {} for place in output.prompt_logprobs or ()),
    ]
    logprobs = [{token: (entry.logprob, entry.rank) for token, entry in p.items()} for p in places]
    return list(completion.token_ids), completion.finish_reason, logprobs


def test_a_mask_ends_with_its_request(engines: Engines) -> None:
    """A stream; B with allowed tokens beside it; A ends, so that B moves; others come after it."""
    company = Company(engines("llama"))
    prompts = make_prompts([20, 21, 22, 23], seed=3)
    company.add("a", prompts[0], {})
    for _ in range(4):
        company.step()
    company.add("b", prompts[1], {"allowed_token_ids": [300], "max_tokens": 60})
    while "a" in company.going:
        company.step()
    for _ in range(3):
        company.step()
    company.add("c", prompts[2], {})
    company.add("d", prompts[3], {})
    company.to_the_end()
    assert company.answers["b"][0] == [300] * 60
    for name, prompt in zip("acd", (prompts[0], *prompts[2:]), strict=True):
        expected = reference_generate(company.engine.checkpoint, prompt, 12).token_ids
        assert company.answers[name][0] == expected, name


PREEMPTING = {"num_gpu_blocks_override": 18, "enable_prefix_caching": True}


IN_FLIGHT = {"async_scheduling": True}


@pytest.mark.parametrize(
    "options",
    [LORA, PREEMPTING, LORA | IN_FLIGHT, PREEMPTING | IN_FLIGHT],
    ids=["adapters", "preempted", "adapters-in-flight", "preempted-in-flight"],
)
def test_arrivals_and_departures_change_no_answer(
    engines: Engines, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = engines("llama", **options)
    company, rng = Company(engine), random.Random(11)
    adapters: list[LoRARequest | None] = [None]
    if "enable_lora" in options:
        for number in (1, 2):
            folder = make_adapter(engine.checkpoint, tmp_path / str(number), seed=number)
            adapters.append(LoRARequest(f"neighbour-{number}", number, str(folder)))
    # Half of them plain, which show best what others left behind.
    requests = [
        (
            prompt,
            {"max_tokens": rng.randrange(4, 25)}
            | rng.choice((rng.choice(FEATURES), MASKED, {}, {})),
            rng.choice(adapters),
        )
        for prompt in make_prompts([3 + 7 * (n % 9) for n in range(60)], seed=12)
    ]
    for number, request in enumerate(requests):
        company.add(f"alone-{number}", *request)
        company.to_the_end()
    aborted = set()
    for number, request in rng.sample([*enumerate(requests)], len(requests)):
        company.add(f"beside-{number}", *request)
        for _ in range(rng.randrange(7)):
            company.step()
        if company.going and rng.random() < 0.15:
            aborted.add(leaving := rng.choice(sorted(company.going)))
            company.abort(leaving)
    company.to_the_end()
    for number, (_, features, _) in enumerate(requests):
        if f"beside-{number}" not in aborted:
            together, alone = (company.answers[f"{when}-{number}"] for when in ("beside", "alone"))
            assert together[0] == alone[0], features
            assert together == alone, features
    assert engine.total("rbln_recompiles_after_warmup_total") == 0
    for adapter in filter(None, adapters):
        engine.core.model_executor.driver_worker.worker.remove_lora(adapter.lora_int_id)
