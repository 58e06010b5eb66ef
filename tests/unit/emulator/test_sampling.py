"""Drawn tokens: vLLM's distribution and limits, ties and edges included, the same bits anywhere.

Random numbers that lie evenly spread give every token its share of the draws, to one draw.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.kernel_set import set_threads
from tests.unit.emulator.cases import DTYPES

sample = torch.ops.rbln_emulator.sample
MANY = 20_000


def evenly(count: int) -> Tensor:
    return (torch.arange(count) - count // 2) * (2**64 // count)


def limits(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return top_k, top_p and min_p by row."""
    top_k = torch.randint(1, width + 1, (rows,), dtype=torch.int32)
    return top_k, torch.rand(rows).clamp(min=0.01), torch.rand(rows) * 0.3


def shares(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Return each token's share of ``MANY`` draws from logits [V]."""
    tokens = sample(
        logits.expand(MANY, -1),
        torch.full((MANY,), temperature),
        None if top_k is None else torch.full((MANY,), top_k, dtype=torch.int32),
        None if top_p is None else torch.full((MANY,), top_p),
        None if min_p is None else torch.full((MANY,), min_p),
        evenly(MANY),
    )
    return torch.bincount(tokens.flatten(), minlength=len(logits)) / MANY


def vllm_shares(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """The probabilities that vLLM's sampler draws by."""
    scores = logits.float()[None] / temperature
    if min_p is not None:
        probabilities = scores.softmax(-1)
        scores[probabilities < probabilities.amax() * min_p] = -torch.inf
    k = None if top_k is None else torch.tensor([top_k], dtype=torch.int32)
    p = None if top_p is None else torch.tensor([top_p])
    return apply_top_k_top_p_pytorch(scores, k, p).softmax(-1)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 77, 3000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 30, "top_p": 0.6, "min_p": 0.02},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_shares_are_vllms(options: dict[str, float], width: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(width) * 2).to(dtype)
    if options.get("top_k", 0) > width:
        options = options | {"top_k": width}
    drawn, expected = shares(logits, **options), vllm_shares(logits, **options)
    if width == 3000:
        # There vLLM's sort leaves open which of equal ones is dropped.
        drawn, expected = drawn.sort().values, expected.sort().values
    assert float((drawn - expected).abs().max()) < 2.5 / MANY
    assert not drawn[expected == 0].any()


@pytest.mark.parametrize(
    ("logits", "options", "kept"),
    [
        # Of equal ones top_p drops the first first, and top_k none.
        ([0.0] * 4, {"top_p": 0.5}, [2, 3]),
        ([0.0] * 4, {"top_p": 0.51}, [1, 2, 3]),
        ([0.0] * 40, {"top_p": 0.01}, [39]),
        ([1.0, 2.0, 1.0, 1.0], {"top_k": 2}, [0, 1, 2, 3]),
        ([1.0, 2.0, 1.0, 0.0], {"top_k": 2, "top_p": 0.5}, [1]),
        ([1.0, 2.0, 1.0, 0.0], {"top_k": 2, "top_p": 0.7}, [1, 2]),
        # A sum that is 1 - top_p exactly is dropped.
        ([0.75, 0.25], {"top_p": 0.75, "is_log": True}, [0]),
        ([0.25, 0.5, 0.125, 0.125], {"top_p": 0.75, "is_log": True}, [0, 1]),
        ([0.25, 0.5, 0.125, 0.125], {"top_p": 0.8, "is_log": True}, [0, 1, 3]),
        ([0.5, 0.25, 0.25], {"min_p": 0.5, "is_log": True}, [0, 1, 2]),
        ([0.5, 0.25, 0.25], {"min_p": 1.0, "is_log": True}, [0]),
        ([-torch.inf, 3.0, -torch.inf, 3.0], {"top_k": 3}, [1, 3]),
        ([-torch.inf, 3.0, torch.nan, 3.0], {"top_p": 0.99}, [1, 3]),
        ([-torch.inf, torch.inf, 3.0], {"top_p": 0.9}, [1]),
        ([torch.nan] * 20, {"top_k": 3, "top_p": 0.9}, [0]),
        ([-torch.inf] * 20, {}, [0]),
    ],
)
def test_ties_edges_and_infinities(
    logits: list[float], options: dict[str, float], kept: list[int]
) -> None:
    own = dict(options)
    row = torch.tensor(logits)
    if own.pop("is_log", False):
        row = row.log2() * torch.tensor(2.0).log()
    drawn = shares(row, **own)
    assert drawn.nonzero().flatten().tolist() == kept
    # Its sort leaves the order of more than 16 equal ones open.
    if row.isfinite().all() and len(row) <= 16:
        assert vllm_shares(row, **own).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("spread", [0.0, 1e-4, 1.0, 40.0])
def test_the_limits_of_a_large_vocabulary_are_vllms(spread: float) -> None:
    """Thousands of tokens are equal in bfloat16, and none is drawn that vLLM would not draw."""
    row = (torch.randn(50_000) * spread).bfloat16()
    for options in ({"top_p": 0.3}, {"top_k": 999}, {"top_k": 30_000, "top_p": 0.5}):
        expected = vllm_shares(row, **options)
        tokens = sample(
            row.expand(500, -1),
            torch.ones(500),
            torch.full((500,), options.get("top_k", 50_000), dtype=torch.int32),
            torch.full((500,), options.get("top_p", 1.0)),
            None,
            evenly(500),
        ).flatten()
        least = float(row[expected > 0].min())
        assert float(row[tokens].min()) >= least
        # By number of draws for each distinct score.
        scores, places = row.unique(return_inverse=True)
        drawn = torch.zeros(len(scores)).index_add_(0, places[tokens], torch.full((500,), 1 / 500))
        wanted = torch.zeros(len(scores)).index_add_(0, places, expected)
        assert float((drawn - wanted).abs().max()) < 0.02


def test_a_million_draws_pass_a_chi_squared_test() -> None:
    count = 1_000_000
    logits = torch.randn(40) * 2
    generator = torch.Generator().manual_seed(4)
    randoms = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    temperature, top_p = torch.full((count,), 0.8), torch.full((count,), 0.97)
    set_threads(2)
    tokens = sample(logits.expand(count, -1), temperature, None, top_p, None, randoms)
    counts = torch.bincount(tokens.flatten(), minlength=40).double()
    expected = vllm_shares(logits, temperature=0.8, top_p=0.97).double() * count
    kept = expected > 0
    assert not counts[~kept].any()
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Five deviations from its mean.
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 13, 500, 20_001])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_every_body_and_thread_count_draws_the_same(
    spread: float, width: int, dtype: torch.dtype
) -> None:
    rows = 9
    logits = (torch.randn(rows, width + 3) * spread).to(dtype)[:, :width]
    temperature = torch.rand(rows) * 2
    temperature[3] = 0.0
    randoms = torch.empty(rows, dtype=torch.int64).random_(-(2**63), None)
    top_k, top_p, min_p = limits(rows, width)
    for chosen in ((None, None, None), (None, top_p, None), (top_k, None, min_p)):
        expected = fallback.sample(logits, temperature, *chosen, randoms)
        for threads in (1, 3):
            set_threads(threads)
            assert torch.equal(sample(logits, temperature, *chosen, randoms), expected)
        for row in range(rows):
            own = [None if values is None else values[row : row + 1] for values in chosen]
            alone = sample(
                logits[row : row + 1], temperature[row : row + 1], *own, randoms[row:][:1]
            )
            assert torch.equal(alone[0], expected[row])


def test_a_wrong_number_of_parameters_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"temperature is .* for 2 rows"):
        sample(torch.zeros(2, 5), torch.ones(1), None, None, None, evenly(2))
