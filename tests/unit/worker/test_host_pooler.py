"""A pooler gets every row that it reads, whatever happens to the buffers they came in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.pooler.seqwise import LastPool, MeanPool, SequencePooler
from vllm.pooling_params import PoolingParams
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.worker.pooling import HostPooler


def host_pooler(pooling: object, *, reuses_prefixes: bool = False) -> HostPooler:
    model = nn.Module()
    model.pooler = SequencePooler(pooling=pooling, head=lambda rows, _: rows)
    return HostPooler(model, reuses_prefixes=reuses_prefixes)


def make_request(name: str, num_tokens: int) -> CachedRequestState:
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=list(range(num_tokens)),
        mm_features=[],
        sampling_params=None,
        generator=None,
        block_ids=(),
        num_computed_tokens=0,
        output_token_ids=[],
        pooling_params=PoolingParams(task="embed"),
    )


def metadata_of(request: CachedRequestState) -> PoolingMetadata:
    return PoolingMetadata(
        prompt_lens=torch.tensor([request.num_prompt_tokens]),
        prompt_token_ids=None,
        prompt_token_ids_cpu=None,
        pooling_params=[request.pooling_params],
        pooling_states=[PoolingStates()],
    )


def run(pooler: HostPooler, request: CachedRequestState, rows: Tensor, chunk: int) -> Tensor:
    """Feed ``rows`` through one buffer that every chunk overwrites, and pool."""
    buffer = torch.empty(chunk, rows.shape[1])
    for start in range(request.num_computed_tokens, len(rows), chunk):
        part = rows[start : start + chunk]
        buffer[: len(part)] = part
        request.num_computed_tokens = start
        is_last = start + len(part) == len(rows)
        pooler.add(request, buffer[: len(part)], is_last=is_last)
    result = pooler.pool(request, metadata_of(request))
    buffer.fill_(float("nan"))
    return result


ROWS = torch.arange(40, dtype=torch.float32).view(10, 4) ** 2


@pytest.mark.parametrize("chunk", [3, 5, 10, 16])
def test_a_pooler_of_all_rows_gets_all_rows(chunk: int) -> None:
    result = run(host_pooler(MeanPool()), make_request("a", 10), ROWS, chunk)
    assert torch.equal(result, ROWS.mean(0))


@pytest.mark.parametrize("chunk", [3, 10])
def test_a_last_row_pooler_gets_the_last_chunk(chunk: int) -> None:
    request = make_request("a", 10)
    # After a prefix hit the first rows never come.
    request.num_computed_tokens = 4
    result = run(host_pooler(LastPool(), reuses_prefixes=True), request, ROWS, chunk)
    assert torch.equal(result, ROWS[-1])


def test_a_result_is_a_copy() -> None:
    pooler = host_pooler(lambda rows, _: [rows[2]])
    assert torch.equal(run(pooler, make_request("a", 10), ROWS, 10), ROWS[2])


def test_a_preempted_prompt_starts_over() -> None:
    pooler, request = host_pooler(MeanPool()), make_request("a", 10)
    pooler.add(request, torch.full((6, 4), 99.0), is_last=False)
    assert torch.equal(run(pooler, request, ROWS, 5), ROWS.mean(0))


def test_rows_of_an_aborted_prompt_are_removed() -> None:
    pooler, request = host_pooler(MeanPool()), make_request("a", 10)
    pooler.add(request, torch.full((6, 4), 99.0), is_last=False)
    pooler.remove({"a", "never seen"})
    # The same id again, after a prefix hit of six tokens: nothing of the first is left.
    request.num_computed_tokens = 6
    pooler.add(request, ROWS[:4], is_last=True)
    assert torch.equal(
        pooler.pool(make_request("a", 4), metadata_of(make_request("a", 4))), ROWS[:4].mean(0)
    )


def test_prefix_caching_is_rejected_for_poolers_of_whole_prompts() -> None:
    with pytest.raises(UnsupportedModelError, match="--no-enable-prefix-caching"):
        host_pooler(MeanPool(), reuses_prefixes=True)
