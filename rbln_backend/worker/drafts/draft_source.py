"""The graphs of the draft model that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rbln_backend.core import GraphSpec
from rbln_backend.vllm_compat.surface import VllmConfig, compiled_sizes, configured
from rbln_backend.worker.drafts.draft_layer import DraftLayer, LayerShape
from rbln_backend.worker.drafts.model_drafter import DraftHeads, DraftSource
from rbln_backend.worker.graphs.dispatch import GraphDispatch
from rbln_backend.worker.step.group_inputs import KvGroup
from rbln_backend.worker.step.inputs import StepInputs


def make_source(
    config: VllmConfig,
    groups: Sequence[KvGroup],
    make_inputs: Callable[[GraphSpec], StepInputs],
    dispatch: GraphDispatch,
) -> DraftSource | None:
    """Return the draft model's graphs, None without one; ``make_inputs``: buffers of a step."""
    model, sizes = config.model_config, compiled_sizes(config).drafted
    if sizes is None:
        return None
    hidden_size, dtype = model.get_hidden_size(), model.dtype
    assert isinstance(dtype, torch.dtype), "vLLM resolves names such as 'auto'"
    if sizes.length is None:
        return DraftHeads(hidden_size, dtype, sizes.requests, dispatch)
    shape = LayerShape(
        sizes=sizes,
        hidden_size=hidden_size,
        dtype=dtype,
        prompts=configured(config).chunk_prompts,
        widths=[group.width for group in groups],
        max_model_len=model.max_model_len,
    )
    return DraftLayer(shape, make_inputs, dispatch)
