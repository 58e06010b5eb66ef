"""The greedy kernel names the first of the largest values, whatever the width, type and stride."""

from __future__ import annotations

import pytest
import torch

from rbln_backend.devices.emulated import fallback
from tests.unit.emulator.cases import DTYPES

greedy = torch.ops.rbln_emulator.greedy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 33, 1000, 32001])
def test_it_is_argmax(dtype: torch.dtype, width: int) -> None:
    logits = torch.randn(5, width + 3).to(dtype)[:, :width]
    expected = logits.float().argmax(-1, keepdim=True).int()
    assert torch.equal(greedy(logits), expected)
    assert torch.equal(fallback.greedy(logits), expected)


@pytest.mark.parametrize("places", [[0, 1], [3, 40], [63, 64], [8, 70]])
def test_the_first_of_equals_wins(places: list[int]) -> None:
    logits = torch.zeros(2, 71)
    logits[:, places] = 2.0
    assert greedy(logits).tolist() == [[places[0]]] * 2


@pytest.mark.parametrize("places", [[0, 1024], [1023, 1024], [1500, 4999], [4990, 4999]])
def test_the_first_of_equals_wins_in_other_blocks(places: list[int]) -> None:
    logits = torch.full((2, 5000), -torch.inf)
    logits[:, ::7] = torch.nan
    logits[:, 3] = -1.0
    logits[:, places] = 2.0
    assert greedy(logits).tolist() == [[places[0]]] * 2


def test_infinities_and_nan() -> None:
    low = -torch.inf
    rows = [[low] * 40, [low] * 39 + [0.0], [torch.nan] * 40, [torch.nan] * 20 + [1.0] * 20]
    logits = torch.tensor(rows)
    assert greedy(logits).tolist() == [[0], [39], [0], [20]]
    assert fallback.greedy(logits).tolist() == [[0], [39], [0], [20]]


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="instead of"):
        greedy(torch.zeros(3))
