"""Penalties and log-probabilities of the kernels: vLLM's tensors, whatever a row has had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.sampler import Sampler

from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.kernel_set import set_threads
from rbln_backend.worker.sampling import OutputTokens
from tests.unit.emulator.cases import DTYPES

OPS = torch.ops.rbln_emulator


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [7, 1000])
def test_penalties_are_vllms(width: int, threads: int) -> None:
    set_threads(threads)
    rows = 7
    logits = torch.randn(rows, width) * 4
    logits[2, :3] = torch.tensor([-torch.inf, torch.inf, 0.0])
    # Padding is the number behind the last token, as vLLM has it.
    prompts = torch.randint(0, width + 1, (rows, 1500))
    outputs = [torch.randint(0, width, (row * 300,)).tolist() for row in range(rows)]
    presence, frequency = torch.rand(rows) - 0.5, torch.rand(rows)
    repetition = torch.rand(rows) + 0.5
    repetition[1], presence[3], frequency[3], repetition[3] = 1.0, 0.0, 0.0, 1.0
    penalties = (presence, frequency, repetition)
    expected = apply_all_penalties(logits.clone(), prompts, *penalties, outputs)
    for penalize in (OPS.penalize_, fallback.penalize_):
        actual = logits.clone()
        penalize(actual, prompts, *OutputTokens().joined(outputs), *penalties)
        assert torch.equal(actual, expected)


def test_copies_of_outputs_follow_their_lists() -> None:
    tokens, lists = OutputTokens(), [[1, 2], [], [3]]
    for step in range(300):
        lists[step % 3].append(step)
        if step == 150:
            # Another request, and one that starts over.
            lists[1], lists[2][:] = [9], [8]
        if step == 200:
            lists = [lists[2], lists[0], lists[1]]
        joined, ends = tokens.joined(lists)
        assert joined.tolist() == [token for own in lists for token in own]
        assert ends.tolist() == [sum(map(len, lists[: row + 1])) for row in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 129, 30_001])
def test_logprobs_are_vllms(width: int, dtype: torch.dtype) -> None:
    rows = 6
    logits = (torch.randn(rows, width) * 5).to(dtype)
    logits[1, 1:] = -torch.inf
    tokens = torch.randint(0, width, (rows,), dtype=torch.int32)
    tokens[1] = 0
    for count in (0, 1, 5):
        for raw in (False, True):
            scores = logits.float() if raw else Sampler.compute_logprobs(logits)
            expected = Sampler.gather_logprobs(scores, count, tokens.long())
            for threads in (1, 3):
                set_threads(threads)
                ids, values, ranks = OPS.top_logprobs(logits, tokens, count, not raw)
                exact = logits.double() if raw else logits.double().log_softmax(-1)
                exact = exact.gather(1, ids.long())
                torch.testing.assert_close(values.double(), exact, rtol=1e-7, atol=2e-6)
                # vLLM's sums are in float32.
                torch.testing.assert_close(values, expected.logprobs, rtol=1e-6, atol=2e-5)
                assert torch.equal(ids[:, 0], tokens)
                assert torch.equal(ranks, ranks_of(logits, tokens))


def ranks_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Counted by logits: vLLM counts float32 log-probabilities, of which more are equal."""
    return (logits >= logits.gather(1, tokens.long()[:, None])).sum(-1)


def test_the_first_of_equal_tokens_is_the_likeliest() -> None:
    logits = torch.zeros(2, 40)
    logits[:, 30] = 1.0
    ids, values, ranks = OPS.top_logprobs(logits, torch.tensor([7, 30], dtype=torch.int32), 3, True)
    assert ids.tolist() == [[7, 30, 0, 1], [30, 30, 0, 1]]
    assert ranks.tolist() == [40, 1]
    assert bool((values[:, 1:].diff() <= 0).all())


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(IndexError, match=r"tokens\[0\] is 5"):
        OPS.top_logprobs(torch.zeros(1, 5), torch.tensor([5], dtype=torch.int32), 1, True)
    with pytest.raises(IndexError, match=r"output_ends\[0\] is 2 of 1"):
        OPS.penalize_(
            *(torch.zeros(1, 5), torch.zeros(1, 1, dtype=torch.int64)),
            *(torch.zeros(1, dtype=torch.int32), torch.tensor([2]), *(torch.ones(1),) * 3),
        )
