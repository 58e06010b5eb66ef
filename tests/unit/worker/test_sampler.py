"""The fast path of greedy steps gives vLLM's tokens, and is only used for plain greedy requests.

Fields of the metadata are made by vLLM's own batch, from requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch

from rbln_backend.devices.emulated.kernel_set import load_kernels
from rbln_backend.worker.sampling import GreedySampler
from tests.kernel_cache import share_kernels
from tests.unit.worker.sampling_batches import sampling_batch

VOCABULARY = 97


class NoMinTokens(MinTokensLogitsProcessor):
    """vLLM's, without a configuration to read."""

    def __init__(self) -> None:
        self.min_toks = {}
        self.device = torch.device("cpu")
        self.pin_memory = False
        self.neg_inf_tensor = torch.tensor(-float("inf"))
        self.logits_slice = (torch.tensor([], dtype=torch.int32),) * 2


@pytest.fixture(autouse=True)
def native_kernels(tmp_path: Path) -> None:
    load_kernels(share_kernels(tmp_path), "native")


def batch_of(*requests: dict[str, Any]) -> InputBatch:
    return sampling_batch(
        [SamplingParams(**({"temperature": 0.0} | options)) for options in requests],
        NoMinTokens(),
        vocabulary=VOCABULARY,
        rows=4,
        tokens=[5, 5],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logit_bias": {7: 50.0}},
        {"repetition_penalty": 9.0},
        {"bad_words": []},
        {"allowed_token_ids": [4, 9]},
        {"logprobs": 3},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_tokens_and_logprobs_are_vllms(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, VOCABULARY).to(dtype)
    metadata = batch_of({}, options, {}).sampling_metadata
    expected = Sampler()(logits=logits.clone(), sampling_metadata=metadata)
    sampled = GreedySampler()(logits=logits.clone(), sampling_metadata=metadata)
    assert torch.equal(sampled.sampled_token_ids, expected.sampled_token_ids)
    assert (sampled.logprobs_tensors is None) == (expected.logprobs_tensors is None)


def test_a_bias_added_or_removed_is_noticed() -> None:
    """The metadata of a batch does not change with it."""
    batch, sampler = batch_of({}), GreedySampler()
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3] = 1.0
    metadata = batch.sampling_metadata
    bias = metadata.logitsprocs.non_argmax_invariant[0]
    tokens = [sampler(logits=logits.clone(), sampling_metadata=metadata)]
    bias.biases, bias.bias_tensor = {0: {7: 50.0}}, torch.tensor([50.0])
    bias.logits_slice = (torch.tensor([0]), torch.tensor([7]))
    tokens.append(sampler(logits=logits.clone(), sampling_metadata=metadata))
    assert [t.sampled_token_ids.tolist() for t in tokens] == [[[3]], [[7]]]
