"""Draws of the kernel in vLLM's batches: its distribution, and the same tokens in any company."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from rbln_backend.config import NO_TOKEN
from rbln_backend.core import StepOutputs
from rbln_backend.worker.inputs import DecodeRows, LongestFirst
from rbln_backend.worker.sampling import GreedySampler, KernelPicks, KernelSampler, RowSampler

VOCABULARY, ROWS = 30, 256
pytestmark = pytest.mark.usefixtures("native_kernels")


class FreeMinP(MinPLogitsProcessor):
    """vLLM's, without a configuration to read; of no type that the kernel knows."""

    def __init__(self) -> None:
        self.min_p_count = 0
        self.min_p_cpu_tensor = torch.zeros(ROWS)
        self.min_p_cpu = self.min_p_cpu_tensor.numpy()
        self.use_double_tensor = False
        self.min_p_device = self.min_p_cpu_tensor
        self.min_p = self.min_p_device[:0]


def known_min_p() -> MinPLogitsProcessor:
    processor = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
    FreeMinP.__init__(processor)  # type: ignore[arg-type]
    return processor


def sampling_batch(
    requests: Sequence[SamplingParams],
    processor: LogitsProcessor,
    *,
    vocabulary: int,
    rows: int,
    tokens: Sequence[int],
) -> InputBatch:
    """vLLM's own batch of at most `rows` requests that have generated `tokens`.

    Logits pass the bias of each request and `processor`.
    """
    device = torch.device("cpu")
    bias = LogitBiasLogitsProcessor(None, device, False)
    sizes = {"max_num_reqs": rows, "max_model_len": 32, "max_num_batched_tokens": 32}
    blocks = {"block_sizes": [16], "kernel_block_sizes": [16], "max_num_blocks_per_req": [2]}
    processors = LogitsProcessors([bias, processor])
    batch = InputBatch(
        **sizes, **blocks, device=device, vocab_size=vocabulary, logitsprocs=processors
    )
    for number, params in enumerate(requests):
        seeded = None if params.seed is None else torch.Generator().manual_seed(params.seed)
        state = {"prompt_token_ids": [1, 2, 3], "mm_features": [], "num_computed_tokens": 2}
        state |= {"sampling_params": params, "generator": seeded, "block_ids": ([number + 1],)}
        batch.add_request(
            CachedRequestState(req_id=str(number), output_token_ids=list(tokens), **state)
        )
    batch.refresh_metadata()
    return batch


def metadata_of(
    *requests: dict[str, Any], min_p: MinPLogitsProcessor | None = None
) -> SamplingMetadata:
    made = [SamplingParams(**options) for options in requests]
    sizes = {"vocabulary": VOCABULARY, "rows": ROWS, "tokens": [5, 5, 6]}
    return sampling_batch(made, min_p or known_min_p(), **sizes).sampling_metadata


def counts(sampler: Sampler, logits: Tensor, metadata: SamplingMetadata, steps: int) -> Tensor:
    """Return how often each token is drawn from the same logits [V] in every row."""
    total = torch.zeros(VOCABULARY)
    for _ in range(steps):
        drawn = sampler(logits=logits.repeat(ROWS, 1), sampling_metadata=metadata)
        total += torch.bincount(drawn.sampled_token_ids.flatten(), minlength=VOCABULARY)
    return total


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.8, "temperature": 0.8},
        {"top_k": 7, "min_p": 0.1},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "top_k": 20},
        {"logit_bias": {4: 3.0}, "seed": 3},
        {"bad_words": [], "allowed_token_ids": [3, 4, 9], "logprobs": 2},
    ],
    ids=",".join,
)
def test_the_distribution_is_vllms(options: dict[str, Any]) -> None:
    logits = torch.randn(VOCABULARY) * 1.5
    metadata = metadata_of(
        *[options | ({"seed": n} if "seed" in options else {}) for n in range(ROWS)]
    )
    ours = counts(KernelSampler(), logits, metadata, 40)
    theirs = counts(Sampler(), logits, metadata, 40)
    both = ours + theirs
    assert torch.equal(ours[both > 40] > 0, theirs[both > 40] > 0)
    # Two samples of the same size: the statistic's mean is the number of tokens less one.
    statistic = float(((ours - theirs) ** 2 / both)[both > 0].sum())
    freedom = int((both > 0).sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    logits = torch.randn(4, VOCABULARY)
    mine = {"seed": 11, "temperature": 1.3, "top_p": 0.9}
    others = [{}, {"seed": 2, "min_p": 0.2}, {"temperature": 0.0, "logprobs": 1}]
    drawn = []
    for count in range(4):
        metadata = metadata_of(mine, *others[:count])
        sampler = KernelSampler()
        steps = [
            sampler(logits=logits[: count + 1].clone(), sampling_metadata=metadata)
            for _ in range(20)
        ]
        drawn.append([int(step.sampled_token_ids[0]) for step in steps])
        # Greedy rows beside it take the largest.
        if count == 3:
            greedy = [int(step.sampled_token_ids[3]) for step in steps]
            assert greedy == [int(logits[3].argmax())] * 20
    assert drawn == [drawn[0]] * 4
    assert len(set(drawn[0])) > 3


def test_what_the_kernel_does_not_know_is_vllms() -> None:
    logits = torch.randn(1, VOCABULARY)
    ours, theirs = (
        sampler(
            logits=logits.clone(),
            sampling_metadata=metadata_of({"min_p": 0.4, "logprobs": 2, "seed": 1}, min_p=min_p),
        )
        for sampler, min_p in ((KernelSampler(), FreeMinP()), (Sampler(), FreeMinP()))
    )
    assert torch.equal(ours.sampled_token_ids, theirs.sampled_token_ids)
    assert torch.equal(ours.logprobs_tensors.logprobs, theirs.logprobs_tensors.logprobs)


MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_reports_of_a_row_change_no_draw(mode: str, dtype: torch.dtype) -> None:
    logits = torch.randn(3, VOCABULARY).to(dtype)
    mine = {"seed": 11, "temperature": 1.3, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    companies: list[list[dict[str, Any]]] = [
        [mine],
        [mine | {"logprobs": 0}],
        [mine | {"logprobs": -1}],
        [mine, {"temperature": 0.0, "logprobs": 3}, {"seed": 2, "logprobs": 1}],
    ]
    drawn = []
    for requests in companies:
        metadata, sampler = metadata_of(*requests), KernelSampler(logprobs_mode=mode)
        rows = logits[: len(requests)]
        steps = [sampler(logits=rows.clone(), sampling_metadata=metadata) for _ in range(20)]
        drawn.append([int(step.sampled_token_ids[0]) for step in steps])
    assert drawn == [drawn[0]] * len(companies)
    assert len(set(drawn[0])) > 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_reports_are_vllms(mode: str, dtype: torch.dtype) -> None:
    """Raw ones of logits without penalties, processed ones of what a token was drawn from."""
    requests: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_k": 9, "min_p": 0.01, "seed": 1, "logprobs": 5},
        {"temperature": 1.4, "repetition_penalty": 2.0, "top_p": 0.8},
        {"temperature": 0.0, "logit_bias": {3: 4.0}},
        {"temperature": 0.0, "repetition_penalty": 3.0, "presence_penalty": 1.5},
    ]
    logits = (torch.randn(4, VOCABULARY) * 3).to(dtype)
    found, wanted = (
        sampler(logits=logits.clone(), sampling_metadata=metadata_of(*requests))
        for sampler in (KernelSampler(logprobs_mode=mode), Sampler(logprobs_mode=mode))
    )
    ours, theirs = found.logprobs_tensors, wanted.logprobs_tensors
    assert torch.equal(ours.logprob_token_ids[:, 1:], theirs.logprob_token_ids[:, 1:])
    torch.testing.assert_close(ours.logprobs[:, 1:], theirs.logprobs[:, 1:])
    assert (ours.logprobs[:, 0] > -torch.inf).all()
    assert torch.equal(found.sampled_token_ids[2:], wanted.sampled_token_ids[2:])
    torch.testing.assert_close(ours.logprobs[2:], theirs.logprobs[2:])
    assert torch.equal(ours.selected_token_ranks[2:], theirs.selected_token_ranks[2:])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("sampler", [KernelSampler, RowSampler])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_in_which_all_is_forbidden_has_no_token(
    mode: str, sampler: type[RowSampler], named: bool
) -> None:
    reports = {"logprob_token_ids": [4, 5]} if named else {"logprobs": 2}
    empty: dict[str, Any] = {"allowed_token_ids": [3], "logit_bias": {3: 5.0}}
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"seed": 3}):
        metadata = metadata_of(empty | options, {"temperature": 0.0}, empty | options | reports)
        logits = torch.randn(3, VOCABULARY)
        # As a grammar, or a model whose tokenizer lacks it.
        logits[[0, 2], 3] = -torch.inf
        largest = int(logits[1].argmax())
        found = sampler(logprobs_mode=mode)(logits=logits, sampling_metadata=metadata)
        assert found.sampled_token_ids.flatten().tolist() == [NO_TOKEN, largest, NO_TOKEN]


def test_named_tokens_change_no_other_rows_values() -> None:
    logits = torch.randn(2, VOCABULARY) * 3
    greedy = {"temperature": 0.0}
    metadata = metadata_of(greedy | {"logprobs": 3}, greedy | {"logprob_token_ids": [4, 9]})
    both = KernelSampler()(logits=logits.clone(), sampling_metadata=metadata).logprobs_tensors
    alone = metadata_of(greedy | {"logprobs": 3})
    own = KernelSampler()(logits=logits[:1].clone(), sampling_metadata=alone).logprobs_tensors
    assert torch.equal(both.logprobs[0], own.logprobs[0])
    assert torch.equal(both.logprob_token_ids[0], own.logprob_token_ids[0])
    assert both.logprob_token_ids[1].tolist() == [int(logits[1].argmax()), 4, 9, 0]
    expected = logits[1].log_softmax(-1)[both.logprob_token_ids[1, :3].long()]
    torch.testing.assert_close(both.logprobs[1, :3], expected)
    assert float(both.logprobs[1, 3]) == -torch.inf


# ------------------------------------------------------------------------------------------ sampler
SAMPLER_VOCABULARY = 97


class NoMinTokens(MinTokensLogitsProcessor):
    """vLLM's, without a configuration to read."""

    def __init__(self) -> None:
        self.min_toks = {}
        self.device = torch.device("cpu")
        self.pin_memory = False
        self.neg_inf_tensor = torch.tensor(-float("inf"))
        self.logits_slice = (torch.tensor([], dtype=torch.int32),) * 2


def batch_of(*requests: dict[str, Any]) -> InputBatch:
    made = [SamplingParams(**({"temperature": 0.0} | options)) for options in requests]
    sizes = {"vocabulary": SAMPLER_VOCABULARY, "rows": 4, "tokens": [5, 5]}
    return sampling_batch(made, NoMinTokens(), **sizes)


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
    logits = torch.randn(3, SAMPLER_VOCABULARY).to(dtype)
    metadata = batch_of({}, options, {}).sampling_metadata
    expected = Sampler()(logits=logits.clone(), sampling_metadata=metadata)
    sampled = GreedySampler()(logits=logits.clone(), sampling_metadata=metadata)
    assert torch.equal(sampled.sampled_token_ids, expected.sampled_token_ids)
    assert (sampled.logprobs_tensors is None) == (expected.logprobs_tensors is None)


def test_a_bias_added_or_removed_is_noticed() -> None:
    """The metadata of a batch does not change with it."""
    batch, sampler = batch_of({}), GreedySampler()
    logits = torch.zeros(1, SAMPLER_VOCABULARY)
    logits[0, 3] = 1.0
    metadata = batch.sampling_metadata
    bias = metadata.logitsprocs.non_argmax_invariant[0]
    tokens = [sampler(logits=logits.clone(), sampling_metadata=metadata)]
    bias.biases, bias.bias_tensor = {0: {7: 50.0}}, torch.tensor([50.0])
    bias.logits_slice = (torch.tensor([0]), torch.tensor([7]))
    tokens.append(sampler(logits=logits.clone(), sampling_metadata=metadata))
    assert [t.sampled_token_ids.tolist() for t in tokens] == [[[3]], [[7]]]


# -------------------------------------------------------------------------------------------- picks
PICKS_ROWS, PICKS_VOCABULARY = 4, 300


def largest(logits: torch.Tensor) -> list[list[int]]:
    return logits.float().argmax(-1, keepdim=True).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_logits_of_a_graph_change_from_run_to_run(dtype: torch.dtype) -> None:
    pick = KernelPicks()
    assert pick is not None
    logits = torch.zeros(PICKS_ROWS, PICKS_VOCABULARY, dtype=dtype)
    for _ in range(3):
        # All different, so that each row has one largest value.
        for row in logits:
            row.copy_(torch.randperm(PICKS_VOCABULARY))
        assert pick(StepOutputs([logits]), PICKS_ROWS) == largest(logits)
        assert pick(StepOutputs([logits]), 3) == largest(logits)[:3]


def test_tokens_come_back_in_the_schedulers_order() -> None:
    pick, order = KernelPicks(), LongestFirst()
    blocks = [np.zeros((3, 1), dtype=np.int32)]
    order.arrange(DecodeRows(np.arange(3), np.array([5, 20, 7]), blocks), PICKS_ROWS)
    logits = torch.zeros(PICKS_ROWS, PICKS_VOCABULARY)
    # Rows of the graph: requests 1, 2 and 0, and padding.
    logits[[0, 1, 2], [11, 12, 10]] = 1.0
    for _ in range(2):
        assert pick(StepOutputs([logits], order.restore), 3) == [[10], [11], [12]]


def test_logits_that_are_new_in_each_run_are_not_kept() -> None:
    pick = KernelPicks()
    for _ in range(5):
        logits = torch.randn(PICKS_ROWS, PICKS_VOCABULARY)
        assert pick(StepOutputs([logits]), PICKS_ROWS) == largest(logits)
    seen = ref(logits)
    del logits
    assert seen() is None


def test_every_graph_is_recorded_and_a_released_one_is_forgotten() -> None:
    """More graphs than any earlier limit; each replays after all of them have run."""
    pick, graphs = KernelPicks(), [torch.randn(PICKS_ROWS, PICKS_VOCABULARY) for _ in range(200)]
    for _ in range(2):
        assert all(pick(StepOutputs([g]), PICKS_ROWS) == largest(g) for g in graphs)
    ran: list[str] = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with Dispatched():
        for graph in graphs:
            pick(StepOutputs([graph]), PICKS_ROWS)
    assert not [name for name in ran if "greedy" in name]
    released = ref(graph)
    del graph, graphs
    assert released() is None
