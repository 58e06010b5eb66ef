"""The step loop of pooling models: scheduler output in, embeddings or scores out.

In vLLM a pooler gets the rows of one step, and most poolers reject a part of a prompt. Here a
pooler runs once per request, after the last chunk, over every row that it reads, so that all
poolers work with any chunk size. A pooler that reads the last row alone gets the last chunk alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.pooler import DispatchPooler, Pooler
from vllm.model_executor.layers.pooler.seqwise import LastPool, SequencePooler
from vllm.pooling_params import PoolingParams
from vllm.tasks import PoolingTask
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
from vllm.v1.pool.metadata import PoolingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.worker.runner import StepRunner

# Tasks whose prompts vLLM computes from the first token on, past every prefix hit.
_NEVER_CACHED = frozenset(("token_embed", "token_classify", "plugin"))


def pooling_tasks(model: nn.Module) -> tuple[str, ...]:
    """Return the tasks that the pooler of a pooling model supports, by vLLM's names."""
    return tuple(sorted(_get_pooler(model).get_supported_tasks()))


class HostPooler:
    """Gathers the hidden states of each request and pools them on the host."""

    def __init__(self, model: nn.Module, *, reuses_prefixes: bool) -> None:
        """Raises ``UnsupportedModelError`` if a prefix hit would hide rows from the pooler."""
        self._pooler = _get_pooler(model)
        self._rows: dict[str, list[Tensor]] = {}
        # For scores of late-interaction models: stores a query's rows until its documents arrive.
        self._late_interaction = LateInteractionRunner()
        tasks = self._pooler.get_supported_tasks() - _NEVER_CACHED if reuses_prefixes else ()
        for task in sorted(tasks):
            if not _reads_last_row(self._pooler, task):
                raise UnsupportedModelError(
                    f"prefix caching with the pooler of task {task!r}, which reads the whole "
                    "prompt: start with --no-enable-prefix-caching"
                )

    def add(self, request: CachedRequestState, hidden: Tensor, *, is_last: bool) -> None:
        """Store the rows of one chunk: ``hidden`` [n, H], a view of a graph's output.

        ``is_last``: the chunk ends the prompt, so ``pool`` follows before the next run.
        """
        params = _params(request)
        assert params.task is not None, "vLLM's front end settles the task of each request"
        rows = self._rows.get(request.req_id)
        if rows is None:
            self._pooler.get_pooling_updates(params.task).apply(params)
            self._late_interaction.register_request(request.req_id, params)
            rows = self._rows[request.req_id] = []
        if request.num_computed_tokens == 0:
            # The first chunk, or a preempted request that starts over.
            rows.clear()
        if is_last:
            rows.append(hidden)
        elif not _reads_last_row(self._pooler, params.task):
            # The next run may overwrite the graph's output.
            rows.append(hidden.clone())

    def pool(self, request: CachedRequestState, metadata: PoolingMetadata) -> Tensor:
        """Return the request's result: [D], [labels], or [T, D] for tasks per token."""
        # A copy: the next run may overwrite the graph's output.
        hidden = torch.cat(self._rows.pop(request.req_id))
        metadata.build_pooling_cursor(
            np.array([len(hidden)]), torch.tensor([request.num_prompt_tokens]), device=hidden.device
        )
        pooled = list(self._pooler(hidden, metadata))
        (result,) = self._late_interaction.postprocess_pooler_output(
            pooled, [_params(request)], [request.req_id], [True]
        )
        assert result is not None, "a pooler returns a result for a whole prompt"
        return result

    def remove(self, request_ids: Iterable[str]) -> None:
        """Drop the rows of requests that finished or were aborted."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._rows.pop(request_id, None)
        self._late_interaction.on_requests_finished(request_ids)


def _get_pooler(model: nn.Module) -> Pooler:
    pooler = model.pooler
    assert isinstance(pooler, Pooler), "vLLM gives every model that it runs for pooling a pooler"
    return pooler


def _params(request: CachedRequestState) -> PoolingParams:
    assert request.pooling_params is not None
    return request.pooling_params


def _reads_last_row(pooler: Pooler, task: PoolingTask) -> bool:
    if isinstance(pooler, DispatchPooler):
        pooler = pooler.poolers_by_task[task]
    return isinstance(pooler, SequencePooler) and isinstance(pooler.pooling, LastPool)


# Token types of BERT and its relatives: type 1 marks the tokens of a pair's second text.
#
# vLLM's models of that family read a token's type from a high bit of its id, and clear the bit
# before the embedding lookup. So the types need no graph input of their own.


_FIELD = "compressed_token_type_ids"
"""The key with which vLLM's front end passes the position of the first token of type 1."""


class TokenTypes:
    """Writes the types into the prompts of new requests, for models that read them there."""

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.models.bert import TOKEN_TYPE_SHIFT, BertEmbedding
        from vllm.model_executor.models.roberta import RobertaEmbedding

        self._mark = 1 << TOKEN_TYPE_SHIFT
        self._reads_marks = any(
            isinstance(module, BertEmbedding | RobertaEmbedding) for module in model.modules()
        )

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Mark the prompts of new requests, in copies of the scheduler's lists."""
        for request in scheduled.scheduled_new_reqs:
            params, prompt = request.pooling_params, request.prompt_token_ids
            if params is None or params.extra_kwargs is None:
                continue
            first: int | None = params.extra_kwargs.get(_FIELD)
            if self._reads_marks and first is not None and prompt is not None:
                marked = [token | self._mark for token in prompt[first:]]
                request.prompt_token_ids = prompt[:first] + marked


class PoolingRunner(StepRunner):
    """Runs one chunk of one prompt per step, and pools on the host after a prompt's last chunk."""

    def __init__(self, pooler: HostPooler, token_types: TokenTypes, **step: Any) -> None:
        """``step``: the arguments of ``StepRunner``."""
        super().__init__(**step)
        self._pooler = pooler
        self._token_types = token_types

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self._pooler.remove(scheduled.finished_req_ids)
        self._token_types.apply(scheduled)
        result = self.run(scheduled)
        if result is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch, hidden = result.batch, result.outputs[0]
        request = self.batches.requests[batch.input_batch.req_ids[0]]
        self._pooler.add(request, hidden[: batch.num_tokens], is_last=batch.samples)
        pooled: Tensor | None = None
        if batch.samples:
            pooled = self._pooler.pool(request, batch.input_batch.get_pooling_metadata())
        return ModelRunnerOutput(
            req_ids=list(batch.input_batch.req_ids),
            req_id_to_index=dict(batch.input_batch.req_id_to_index),
            pooler_output=[pooled],
        )

    def sample_tokens(self, grammar: GrammarOutput | None) -> None:
        """Return None: ``execute_model`` returns the whole result."""
