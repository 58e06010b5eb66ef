"""The background runs in rows and steps that would be unused, and gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from rbln_backend.config import BACKGROUND_PRIORITY
from rbln_backend.scheduler import priorities
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

BUCKETS = {
    "decode_batch_bucket_strategy": "manual",
    "decode_batch_bucket_manual_buckets": [1, 2, 4, 8],
    # Padding is all that a chunk costs: 40 tokens are cut at 32.
    "prefill_step_tokens": 1,
}
NUM_TOKENS = 40


class Run:
    """Requests of both classes in one engine, stepped by hand."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._core = engine, engine.llm.llm_engine
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: list[str] = []

    def add(self, name: str, prompt: list[int], *, behind: bool = False) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        priority = BACKGROUND_PRIORITY if behind else 0
        self._core.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)
        self.prompts[name], self.tokens[name] = prompt, []

    def step(self) -> list[str]:
        """The requests that got a token."""
        moved = []
        for output in self._core.step():
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) > len(self.tokens[output.request_id]):
                moved.append(output.request_id)
            self.tokens[output.request_id] = tokens
            if output.finished:
                self.finished.append(output.request_id)
        return moved

    def until(self, number: int) -> None:
        """Step until so many have their first token."""
        while sum(map(bool, self.tokens.values())) < number:
            self.step()

    def to_the_end(self) -> None:
        while self._core.has_unfinished_requests():
            self.step()

    def assert_exact(self) -> None:
        for name, prompt in self.prompts.items():
            expected = reference_generate(self._engine.checkpoint, prompt, NUM_TOKENS).token_ids
            assert self.tokens[name] == expected, name
        assert self._engine.used_blocks() == 0


def rows(engine: Engine, kind: str) -> float:
    return engine.total("rbln_background_rows_total", kind=kind)


@pytest.fixture
def run(engines: Engines) -> Any:
    engine = engines("gemma3_text", max_num_seqs=8, rbln=BUCKETS)
    mixed = Run(engine)
    yield engine, mixed
    engine.llm.llm_engine.abort_request(list(mixed.prompts), internal=False)


def test_it_fills_the_bucket_of_who_comes_and_waits_otherwise(run: tuple[Engine, Run]) -> None:
    engine, mixed = run
    prompts = make_prompts([20, 70, 33, 50, 41, 25, 130], seed=90)
    alone, padding = rows(engine, "alone"), rows(engine, "padding")
    for number in range(4):
        mixed.add(f"behind-{number}", prompts[number], behind=True)
    mixed.until(4)
    assert set(mixed.step()) == {f"behind-{number}" for number in range(4)}
    assert rows(engine, "alone") > alone
    assert rows(engine, "padding") == padding
    # The longest prompt of all is read before anything else moves, but for what is owed a step.
    for number in range(4, 7):
        mixed.add(f"front-{number}", prompts[number])
    mixed.until(7)
    # Three of the front have the bucket of four: one row is left, always the same one's.
    for _ in range(5):
        moved = set(mixed.step())
        assert {name for name in moved if name.startswith("front")} == {
            f"front-{number}" for number in range(4, 7)
        }
        assert {name for name in moved if name.startswith("behind")} == {"behind-0"}
    assert engine.total("rbln_background_parked") == 3
    assert rows(engine, "padding") > padding
    mixed.to_the_end()
    assert engine.total("rbln_background_parked") == 0
    mixed.assert_exact()


def test_the_front_takes_places_and_blocks(engines: Engines) -> None:
    engine = engines.fresh(
        "llama", max_num_seqs=4, num_gpu_blocks_override=24, enable_prefix_caching=False
    )
    mixed = Run(engine)
    prompts = make_prompts([40, 45, 50, 55, 90, 120], seed=91)
    for number in range(4):
        mixed.add(f"behind-{number}", prompts[number], behind=True)
    mixed.until(4)
    # There is no place, and hardly a block.
    for number in (4, 5):
        mixed.add(f"front-{number}", prompts[number])
    mixed.to_the_end()
    assert engine.total("rbln_background_preemptions_total") >= 2
    assert mixed.finished[:2] == ["front-4", "front-5"]
    mixed.assert_exact()


def test_prompts_of_the_background_come_seldom_beside_streams(run: tuple[Engine, Run]) -> None:
    _, mixed = run
    front, behind = make_prompts([30, 60], seed=92)
    mixed.add("front", front)
    mixed.until(1)
    mixed.add("behind", behind, behind=True)
    while "front" not in mixed.finished:
        assert mixed.step() == ["front"], "no chunk took its step"
    mixed.to_the_end()
    mixed.assert_exact()


def test_a_prompt_that_comes_seldom_is_not_cut(
    run: tuple[Engine, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it takes two steps; beside a stream the second would be a long time in coming."""
    engine, mixed = run
    monkeypatch.setattr(priorities, "STEPS_PER_CHUNK", 5)

    def chunks() -> float:
        return engine.total("rbln_bucket_steps_total", phase="prefill")

    front, alone, behind = make_prompts([30, 40, 40], seed=93)
    before = chunks()
    mixed.add("alone", alone, behind=True)
    mixed.until(1)
    assert chunks() == before + 2
    mixed.add("front", front)
    mixed.until(2)
    before = chunks()
    mixed.add("behind", behind, behind=True)
    mixed.until(3)
    assert chunks() == before + 1
    mixed.to_the_end()
    mixed.assert_exact()
