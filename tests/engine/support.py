"""What several modules of engine tests use: prompts, references, known drafts and budgets."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from rbln_backend.speculation.drafter import DraftedRequest
from tests.engine.conftest import Engine
from tests.reference import reference_generate

NUM_TOKENS = 33
PAD_TOKEN = 0
KNOWN_TO_ALL = 512
"""Tokens that every tiny checkpoint has."""
MOST = 3
"""Drafts of a request in a step."""


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


def make_prompts(lengths: list[int], seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 500) for _ in range(length)] for length in lengths]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)


def assert_equals_reference(
    engine: Engine, prompts: list[list[int]], outputs: list, num_tokens: int = NUM_TOKENS
) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_generate(engine.checkpoint, prompt, num_tokens)
        completion = output.outputs[0]
        assert list(completion.token_ids) == expected.token_ids, f"prompt of {len(prompt)} tokens"
        for position, token in enumerate(expected.token_ids):
            actual = completion.logprobs[position]
            for token_id, entry in actual.items():
                reference = float(expected.logprobs[position, token_id])
                assert entry.logprob == pytest.approx(reference, abs=1e-3)
            assert token in actual


def poison_padding(checkpoint: Path, target: Path) -> Path:
    """A copy whose padding token embeds as NaN, so that padded rows are NaN in every layer."""
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][PAD_TOKEN] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
