"""Sampling on the device, over the double: tokens are spread as vLLM's sampler spreads them.

The double's op draws with a generator of its own, as the SDK's. With asynchronous scheduling the
double keeps outputs back until they are read.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, THREE_CHUNKS, Ran, run_lives
from tests.reference import reference_generate
from tests.sdk_double.launch import read_log
from tests.vendor.environment import torch_rbln_variables

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).with_name("sampling_script.py")
ON_DEVICE = {"sample_on_device": True}
IN_FLIGHT = {"async_scheduling": True}
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.0},
    "top_k": {"temperature": 2.0, "top_k": 12},
    "top_p": {"temperature": 2.0, "top_p": 0.3},
    "both": {"temperature": 2.0, "top_k": 8, "top_p": 0.55},
}
EACH = 120
GREEDY = [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}]
SEEDED = {"temperature": 1.5, "seed": 11}
# In standard deviations of the statistic: at most as expected, and at least otherwise.
LIKELY, UNLIKELY = 3.5, 4.0

Request = tuple[list[int], dict[str, Any]]


@dataclass(frozen=True)
class Life:
    """One engine's life: rounds of requests, each with its own sampling parameters."""

    checkpoint: Path
    rounds: list[tuple[list[Request], int]]
    """Requests, and how often all of a round are sent."""
    options: dict[str, Any] = field(default_factory=dict)


def run(life: Life, folder: Path, rbln: dict[str, Any], **double: Any) -> Ran:
    variables = torch_rbln_variables()
    fields = [{"rounds": life.rounds}]
    return Ran(*run_lives(SCRIPT, [life], fields, folder, rbln, variables, **double))


def sampler_runs(log: Path) -> int:
    lines, drawing = read_log(log), set()
    for before, line in pairwise(lines):
        if line["call"] == "runtime" and before["call"] == "compile" and _draws(before):
            drawing.add(line["number"])
    return sum(line["call"] == "run" and line["number"] in drawing for line in lines)


def _draws(compiled: dict[str, Any]) -> bool:
    return any(name == "rbln::top_k_top_p" for name, _ in compiled["sdk_ops"])


def filtered(logprobs: Tensor, fields: dict[str, Any]) -> Tensor:
    """Probabilities [V] of a token, by the definition of each parameter."""
    probs = (logprobs.double() / fields["temperature"]).softmax(0)
    ordered, ids = probs.sort(descending=True)
    ordered[fields.get("top_k", len(ordered)) :] = 0
    ordered /= ordered.sum()
    ordered[ordered.cumsum(0) - ordered >= min(fields.get("top_p", 1.0), 0.995)] = 0
    return torch.zeros_like(probs).scatter(0, ids, ordered / ordered.sum())


def distance(tokens: list[int], probs: Tensor) -> float:
    """Chi-square of ``tokens`` under ``probs`` [V], as a normal deviate (Wilson and Hilferty).

    Tokens of which fewer than five are expected count as one.
    """
    counts, expected = Counter(tokens), probs * len(tokens)
    if any(expected[token] == 0 for token in counts):
        return math.inf
    large = [token for token in range(len(probs)) if expected[token] >= 5]
    pairs = [(counts[token], float(expected[token])) for token in large]
    rest = float(expected.sum()) - sum(e for _, e in pairs)
    if rest >= 1:
        pairs.append((len(tokens) - sum(c for c, _ in pairs), rest))
    free = len(pairs) - 1
    if not free:
        return 0.0
    statistic = sum((c - e) ** 2 / e for c, e in pairs)
    spread = 2 / (9 * free)
    return ((statistic / free) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.fixture(scope="module")
def checkpoint(checkpoints: CheckpointCache) -> Path:
    return checkpoints("llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampling")


@pytest.fixture(scope="module")
def life(checkpoint: Path) -> Life:
    """All kinds beside greedy requests; then one with a seed beside others of another length."""
    mixed = [*KINDS.values(), *GREEDY]
    many = [(ONE_CHUNK, {**fields, "max_tokens": 2}) for fields in mixed]
    fields = [SEEDED, KINDS["both"], GREEDY[0]]
    prompts = [ONE_CHUNK, THREE_CHUNKS, ONE_CHUNK]
    few = [(p, {**f, "max_tokens": 8}) for p, f in zip(prompts, fields, strict=True)]
    return Life(checkpoint, [(many, EACH), (few, 1)])


@pytest.fixture(scope="module")
def cold(life: Life, folder: Path) -> Ran:
    return run(life, folder, ON_DEVICE)


@pytest.fixture(scope="module")
def in_flight(life: Life, folder: Path) -> Ran:
    return run(replace(life, options=IN_FLIGHT), folder / "in flight", ON_DEVICE, hold=1)


@pytest.fixture(params=["cold", "in_flight"])
def drawn_by(request: pytest.FixtureRequest) -> Ran:
    ran: Ran = request.getfixturevalue(request.param)
    return ran


def test_tokens_are_spread_as_the_parameters_say(life: Life, drawn_by: Ran) -> None:
    """The first token comes from a prompt's logits, the second from those of a decode step."""
    answers, width = drawn_by.answers[0][0], len(KINDS) + len(GREEDY)
    first, second = reference_generate(life.checkpoint, ONE_CHUNK, 2).logprobs
    greedy = int(first.argmax())
    for place, (kind, fields) in enumerate(KINDS.items()):
        own = answers[place::width]
        drawn = {"first": ([a[0] for a in own], first)}
        drawn["second"] = ([a[1] for a in own if a[0] == greedy], second)
        for name, (tokens, logprobs) in drawn.items():
            assert distance(tokens, filtered(logprobs, fields)) < LIKELY, f"{kind}, {name}"
        tokens, without = drawn["first"][0], fields | {"temperature": 1.0}
        assert distance(tokens, filtered(first, without)) > UNLIKELY, f"{kind}: no temperature"
        for left_out in ("top_k", "top_p"):
            fewer = {name: value for name, value in fields.items() if name != left_out}
            if fewer != fields:
                assert distance(tokens, filtered(first, fewer)) > UNLIKELY, f"{kind}: {left_out}"
    assert sampler_runs(drawn_by.log) > 1.5 * EACH * width / 4


def test_the_likeliest_token_is_drawn_where_nothing_else_may_be(life: Life, drawn_by: Ran) -> None:
    width, expected = len(KINDS) + len(GREEDY), reference_generate(life.checkpoint, ONE_CHUNK, 2)
    for place in range(len(KINDS), width):
        assert set(map(tuple, drawn_by.answers[0][0][place::width])) == {tuple(expected.token_ids)}


def test_a_seed_gives_the_tokens_of_the_host(life: Life, cold: Ran, folder: Path) -> None:
    """A warm start compiles the graphs that draw tokens again, and no other."""
    few = Life(life.checkpoint, life.rounds[1:])
    on_host = run(few, folder, {})
    assert sampler_runs(on_host.log) == 0
    seeded, _, greedy = on_host.answers[0][0]
    found, _, picked = cold.answers[0][1]
    assert (found, picked) == (seeded, greedy)
    warm = run(few, folder, ON_DEVICE)
    found, _, picked = warm.answers[0][0]
    assert (found, picked) == (seeded, greedy)
    compiled = warm.calls("compile")
    assert [_draws(call) for call in compiled] == [not call["hit"] for call in compiled]
    # Of one row for prompts and decode steps, of two and of four; none while serving.
    assert sum(map(_draws, compiled)) == 3
    assert len(compiled) == len(cold.calls("compile")) == len(on_host.calls("compile")) + 3


def test_the_seed_of_the_engine_repeats_draws(checkpoint: Path, folder: Path) -> None:
    rounds: list[tuple[list[Request], int]] = [
        ([(ONE_CHUNK, {**KINDS["both"], "max_tokens": 8})], 8)
    ]
    first, again, other = (
        run(Life(checkpoint, rounds, {"seed": seed}), folder, ON_DEVICE).answers[0]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_seed_gives_the_same_tokens_with_asynchronous_scheduling(
    cold: Ran, in_flight: Ran
) -> None:
    """Steps wait for the device twice: for the model's logits, then for the tokens of the draw."""
    found, _, picked = in_flight.answers[0][1]
    seeded, _, greedy = cold.answers[0][1]
    assert (found, picked) == (seeded, greedy)
    assert len(in_flight.calls("waited")) > len(in_flight.calls("launch")) / 2 > 0
