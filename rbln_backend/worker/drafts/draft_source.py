"""The graphs of the draft model that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from rbln_backend.core import GraphSpec
from rbln_backend.speculation.choice import draft_model_of
from rbln_backend.vllm_compat.surface import VllmConfig, compiled_sizes, configured
from rbln_backend.worker.drafts.draft_layer import DraftLayer
from rbln_backend.worker.drafts.draft_runs import DraftRuns, DraftShape
from rbln_backend.worker.drafts.model_drafter import DraftHeads, DraftSource
from rbln_backend.worker.graphs.dispatch import GraphDispatch
from rbln_backend.worker.graphs.draft_model import draft_model
from rbln_backend.worker.graphs.eagle3 import reads_layers
from rbln_backend.worker.step.group_inputs import KvGroup
from rbln_backend.worker.step.inputs import StepInputs


def make_source(
    config: VllmConfig,
    groups: Sequence[KvGroup],
    make_inputs: Callable[[GraphSpec], StepInputs],
    dispatch: GraphDispatch,
    served: nn.Module,
) -> DraftSource | None:
    """Return the draft model's graphs, None without one; ``make_inputs``: buffers of a step.

    The draft model is a part of ``served``.
    """
    model, sizes = config.model_config, compiled_sizes(config).drafted
    if sizes is None:
        return None
    hidden_size, dtype = model.get_hidden_size(), model.dtype
    assert isinstance(dtype, torch.dtype), "vLLM resolves names such as 'auto'"
    if sizes.length is None:
        return DraftHeads(hidden_size, dtype, sizes.requests, dispatch)
    own, speculation = draft_model(served), draft_model_of(config)
    assert speculation is not None
    shape = DraftShape(
        sizes=sizes,
        hidden_size=speculation.draft_model_config.get_hidden_size(),
        token_offsets=getattr(own, "draft_id_to_target_id", None),
        dtype=dtype,
        prompts=configured(config).chunk_prompts,
        widths=[group.width for group in groups],
        max_model_len=model.max_model_len,
    )
    return DraftLayer(DraftRuns(shape, make_inputs, dispatch), reads_layers=reads_layers(own))
