"""vLLM's own batch of requests, which makes the metadata that samplers get."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


def sampling_batch(
    requests: Sequence[SamplingParams],
    processor: LogitsProcessor,
    *,
    vocabulary: int,
    rows: int,
    tokens: Sequence[int],
) -> InputBatch:
    """Return a batch of at most `rows` requests that have generated `tokens`.

    Logits pass the bias of each request and `processor`.
    """
    device = torch.device("cpu")
    batch = InputBatch(
        max_num_reqs=rows,
        max_model_len=32,
        max_num_batched_tokens=32,
        device=device,
        vocab_size=vocabulary,
        block_sizes=[16],
        kernel_block_sizes=[16],
        max_num_blocks_per_req=[2],
        logitsprocs=LogitsProcessors([LogitBiasLogitsProcessor(None, device, False), processor]),
    )
    for number, params in enumerate(requests):
        seeded = None if params.seed is None else torch.Generator().manual_seed(params.seed)
        batch.add_request(
            CachedRequestState(
                req_id=str(number),
                prompt_token_ids=[1, 2, 3],
                mm_features=[],
                sampling_params=params,
                generator=seeded,
                block_ids=([number + 1],),
                num_computed_tokens=2,
                output_token_ids=list(tokens),
            )
        )
    batch.refresh_metadata()
    return batch
