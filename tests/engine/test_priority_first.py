"""Priority requests are admitted before all other waiting requests, with the same tokens."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from rbln_backend.config import FIRST_PRIORITY
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

NUM_TOKENS = 12


class Queue:
    """Requests of which two run at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._core = engine, engine.llm.llm_engine
        self._prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.begun: list[str] = []

    def add(self, name: str, prompt: list[int], priority: int = 0) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        self._core.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)
        self._prompts[name] = prompt

    def to_the_end(self) -> None:
        while self._core.has_unfinished_requests():
            for output in self._core.step():
                if output.request_id not in self.tokens:
                    self.begun.append(output.request_id)
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)

    def assert_exact(self) -> None:
        for name, prompt in self._prompts.items():
            expected = reference_generate(self._engine.checkpoint, prompt, NUM_TOKENS).token_ids
            assert self.tokens[name] == expected, name
        assert self._engine.used_blocks() == 0


def test_they_pass_all_who_wait(engines: Engines) -> None:
    engine = engines.fresh("llama", max_num_seqs=2)
    queue = Queue(engine)
    prompts = make_prompts([20, 33, 41, 25, 50, 60], seed=93)
    for number in range(4):
        queue.add(f"came-{number}", prompts[number])
    for number in (4, 5):
        queue.add(f"first-{number}", prompts[number], FIRST_PRIORITY)
    queue.to_the_end()
    # No request had begun. Shorter prompts come first within a class; with room for both in a
    # chunk, the first two of a class begin together.
    assert queue.begun == ["first-4", "first-5", "came-0", "came-3", "came-1", "came-2"]
    queue.assert_exact()
