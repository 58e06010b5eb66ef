"""What several modules of engine tests use: prompts, references, known drafts and budgets."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from rbln_backend.speculation.drafter import DraftBudget, DraftedRequest
from tests.engine.conftest import Engine
from tests.reference import Reference, reference_generate

NUM_TOKENS = 33
PAD_TOKEN = 0
KNOWN_TO_ALL = 512
"""Tokens that every tiny checkpoint has."""
MOST = 3
"""Drafts of a request in a step."""
# Each graph takes a second to capture, so that tests with another subject than buckets have few: a
# chunk, steps of 1 and 4 requests, and the LM head; with drafts also steps of 2 and 4 tokens each.
FEW: dict[str, Any] = {
    "prefill_chunk_buckets": [64],
    "decode_batch_bucket_strategy": "manual",
    "decode_batch_bucket_manual_buckets": [1, 4],
}
FEWER = FEW | {"decode_batch_bucket_manual_buckets": [4], "verify_lengths": [MOST + 1]}


@dataclass
class Oracle:
    """Drafts the known continuation, with a share of wrong tokens and of random lengths."""

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
            self.rng.randrange(KNOWN_TO_ALL) if self.rng.random() < self.lies else t for t in drafts
        ]

    def end(self, request_id: str, finished: bool) -> None:
        del self._going[request_id]

    @property
    def holds_nothing(self) -> bool:
        return not self._going


@dataclass
class AnyLength:
    """A budget that allows steps of random lengths, whatever they cost."""

    least: int = 1
    most: int = MOST + 1
    rng: random.Random = field(default_factory=lambda: random.Random(6))

    def is_paused(self, bucket: int) -> bool:
        return False

    def drafts(self, bucket: int) -> int:
        return self.rng.randint(self.least, self.most) - 1

    def plain(self, bucket: int, seconds: float) -> None:
        pass

    def checked(self, bucket: int, seconds: float, tokens: float) -> float:
        return tokens


@dataclass
class Seldom(AnyLength):
    """A budget that allows drafts after every eighth step."""

    steps: int = 0

    def drafts(self, bucket: int) -> int:
        self.steps += 1
        return 0 if self.steps % 8 else MOST


class SteadyTimes(DraftBudget):
    """The budget of an engine in which each step with drafts takes half as long again as others."""

    def __init__(self) -> None:
        super().__init__(MOST, lambda own: own)

    def plain(self, bucket: int, seconds: float) -> None:
        super().plain(bucket, 1.0)

    def checked(self, bucket: int, seconds: float, tokens: float) -> float:
        return super().checked(bucket, 1.5, tokens)


class Stepped:
    """Requests, by name, of an engine that is stepped by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.core = engine, engine.llm.llm_engine
        self.requests: dict[str, tuple[list[int], SamplingParams, LoRARequest | None]] = {}
        """Those that were not aborted."""
        self.outputs: dict[str, Any] = {}
        """The latest of each request."""
        self.tokens: dict[str, list[int]] = {}
        self.begun: list[str] = []
        """In the order of their first tokens."""
        self.finished: list[str] = []

    @property
    def going(self) -> list[str]:
        return [name for name in self.requests if name not in self.finished]

    def add(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        lora: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        inputs = {"prompt_token_ids": prompt}
        self.core.add_request(name, inputs, params, lora_request=lora, priority=priority)
        self.requests[name], self.tokens[name] = (prompt, params, lora), []

    def abort(self, name: str) -> None:
        self.core.abort_request([name])
        del self.requests[name]
        self.outputs.pop(name, None)

    def step(self, times: int = 1) -> list[str]:
        """Return the requests that got tokens, in their order."""
        moved = []
        for _ in range(times):
            for output in self.core.step():
                name, tokens = output.request_id, list(output.outputs[0].token_ids)
                if len(tokens) > len(self.tokens[name]):
                    moved.append(name)
                    if not self.tokens[name]:
                        self.begun.append(name)
                self.outputs[name], self.tokens[name] = output, tokens
                if output.finished:
                    self.finished.append(name)
        return moved

    def until_begun(self, number: int) -> None:
        while len(self.begun) < number:
            self.step()

    def to_the_end(self) -> None:
        while self.core.has_unfinished_requests():
            self.step()

    def assert_exact(self) -> None:
        """Assert that each ended with the greedy tokens of transformers and left no block."""
        for name, (prompt, params, _) in self.requests.items():
            expected = reference_generate(self.engine.checkpoint, prompt, params.max_tokens)
            assert self.tokens[name] == expected.token_ids, name
        assert self.engine.used_blocks() == 0


def make_prompts(lengths: list[int], seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 500) for _ in range(length)] for length in lengths]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)


def assert_equals_reference(
    engine: Engine,
    prompts: list[list[int]],
    outputs: list,
    num_tokens: int = NUM_TOKENS,
    checkpoint: Path | None = None,
) -> None:
    """Assert the tokens of transformers; of ``checkpoint`` if the engine's is not one of its."""
    path = checkpoint or engine.checkpoint
    assert_equal(outputs, [reference_generate(path, prompt, num_tokens) for prompt in prompts])


def assert_equal(outputs: list[Any], expected: list[Reference], tolerance: float = 1e-3) -> None:
    """Assert tokens, and every log-probability that there is within ``tolerance``."""
    for output, reference in zip(outputs, expected, strict=True):
        length, (completion,) = len(output.prompt_token_ids), output.outputs
        assert list(completion.token_ids) == reference.token_ids, f"prompt of {length} tokens"
        for position, entries in enumerate(completion.logprobs):
            assert reference.token_ids[position] in entries
            for token, entry in entries.items():
                wanted = float(reference.logprobs[position, token])
                assert entry.logprob == pytest.approx(wanted, abs=tolerance)


def poison_padding(checkpoint: Path, target: Path) -> Path:
    """A copy whose padding token embeds as NaN, so that padded rows are NaN in every layer."""
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][PAD_TOKEN] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
