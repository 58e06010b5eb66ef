"""Answers of transformers whose experts see their inputs as e4m3 in groups (W8A8)."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests import reference
from tests.e4m3 import rounded_to_e4m3

_MOST = 448.0


def answers_over_e4m3_inputs(
    path: Path, prompts: Sequence[Sequence[int]], max_tokens: int, group: int
) -> list[list[int]]:
    """Greedy tokens of each prompt, experts' inputs rounded with a scale for each ``group``."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_answers, path, prompts, max_tokens, group).result()


def _answers(
    path: Path, prompts: Sequence[Sequence[int]], max_tokens: int, group: int
) -> list[list[int]]:
    torch.set_num_threads(1)
    model: nn.Module = reference._load(path, None)
    experts = [layer for layer in model.modules() if type(layer).__name__.endswith("MoeExperts")]
    assert experts

    def rounded(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return _in_groups(given[0], group), *given[1:]

    for layer in experts:
        layer.register_forward_pre_hook(rounded)
    return [
        reference._generate(path, tuple(prompt), max_tokens, True, ()).token_ids
        for prompt in prompts
    ]


def _in_groups(x: Tensor, group: int) -> Tensor:
    parts = x.unflatten(-1, (-1, group)).float()
    scales = parts.abs().amax(-1, keepdim=True).clamp_min(1e-10) / _MOST
    return (rounded_to_e4m3(parts / scales).float() * scales).flatten(-2)
