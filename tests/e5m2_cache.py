"""Answers of transformers whose keys and values are those that a cache of e5m2 keeps."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from tests import reference


def rounded_to_e5m2(x: Tensor) -> Tensor:
    """The nearest float of two bits of mantissa and an exponent of -14 or more; float64.

    By its definition, ties to an even last bit. Numbers beyond 57344 are not expected.
    """
    _, exponents = torch.frexp(x.double())
    steps = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponents.clamp(min=-13) - 3)
    return (x.double() / steps).round() * steps


def answers_over_e5m2_cache(
    path: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    scales: tuple[tuple[float, float], ...],
) -> list[list[int]]:
    """Greedy tokens of each prompt; ``scales`` of each layer's keys and values."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_answers, path, prompts, max_tokens, scales).result()


def _answers(
    path: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    scales: tuple[tuple[float, float], ...],
) -> list[list[int]]:
    torch.set_num_threads(1)
    # The reference's rounding, in this process alone.
    vars(reference)["kept_as_e4m3"] = _kept_as_e5m2
    return [
        reference._generate(path, tuple(prompt), max_tokens, True, scales).token_ids
        for prompt in prompts
    ]


def _kept_as_e5m2(x: Tensor, scale: float) -> Tensor:
    return rounded_to_e5m2(x.float() / scale) * scale
