"""The training data of a step: a function of the seed and the step's number alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer

from default_model.corpus.dialogue import Dialogue
from default_model.encoding import Sample, encode

Draw = Callable[[Random], Dialogue | str]

# Samples are cut here; the model card names it as the longest context that was trained.
MAX_LENGTH = 1024
# Padded tokens of a microbatch: what one processor core reads at a time.
_MICROBATCH = 1024


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows padded on the right. ids: int64 [rows, length]; weights: float32, of predicting each."""

    ids: torch.Tensor
    weights: torch.Tensor


def step_samples(
    tokenizer: Tokenizer, draw: Draw, seed: int, step: int, tokens: int
) -> list[Sample]:
    """Draw samples of at least `tokens` tokens together."""
    rng = Random(f"{seed}/{step}")
    samples: list[Sample] = []
    missing = tokens
    while missing > 0:
        sample = encode(tokenizer, draw(rng))
        samples.append(Sample(sample.ids[:MAX_LENGTH], sample.weights[:MAX_LENGTH]))
        missing -= len(samples[-1].ids)
    return samples


def _padded(samples: list[Sample]) -> Microbatch:
    length = max(len(sample.ids) for sample in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    weights = torch.zeros(len(samples), length)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        weights[row, : len(sample.ids)] = torch.tensor(sample.weights)
    weights[:, 0] = 0.0
    return Microbatch(ids, weights)


def microbatches(samples: list[Sample]) -> list[Microbatch]:
    """Put samples of like length together, so that little is padding."""
    groups: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.ids)):
        if groups and len(groups[-1][0].ids) * (len(groups[-1]) + 1) <= _MICROBATCH:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return [_padded(group) for group in groups]


def shares(batches: list[Microbatch], workers: int) -> list[list[Microbatch]]:
    """Divide `batches` between `workers`, about evenly and always in the same way."""
    found: list[list[Microbatch]] = [[] for _ in range(workers)]
    load = [0] * workers
    for batch in sorted(batches, key=lambda batch: -batch.ids.numel()):
        least = load.index(min(load))
        found[least].append(batch)
        load[least] += batch.ids.numel()
    return found
