"""The part of a cache key that all graphs of one server share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rbln_backend.config import RblnConfig
from rbln_backend.speculation.choice import draft_model_of
from rbln_backend.vllm_compat.model_identity import model_fields, without_provenance
from rbln_backend.vllm_compat.surface import VllmConfig
from rbln_backend.vllm_compat.vocabulary import missing_in
from rbln_backend.worker.graphs.draft_embedding import has_own_embedding
from rbln_backend.worker.step.group_inputs import KvGroup


def cache_fields(config: VllmConfig, rbln: RblnConfig, groups: Sequence[KvGroup]) -> dict[str, Any]:
    """Return the fields besides device, phase and bucket that change a graph; weights do not."""
    parallel = config.parallel_config
    return {
        **model_fields(config, rbln),
        "kv_groups": [dataclasses.asdict(group) for group in groups],
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "data": parallel.data_parallel_size,
            "expert": parallel.enable_expert_parallel,
            "rank": parallel.rank,
            # Ranks may hold different numbers of experts.
            "data_rank": parallel.data_parallel_rank if parallel.enable_expert_parallel else 0,
        },
        "lora": _adapter_fields(config),
        "masks_tokens": bool(missing_in(config.model_config)),
        **_draft_fields(config),
    }


def _adapter_fields(config: VllmConfig) -> dict[str, Any] | None:
    lora = config.lora_config
    if lora is None:
        return None
    targets = None if lora.target_modules is None else sorted(lora.target_modules)
    return {"slots": lora.max_loras, "rank": lora.max_lora_rank, "targets": targets}


def _draft_fields(config: VllmConfig) -> dict[str, Any]:
    """Return the fields of the draft model and the number of its drafts; none without one."""
    speculation = draft_model_of(config)
    if speculation is None:
        return {}
    own = speculation.draft_model_config
    described = json.loads(json.dumps(own.hf_config.to_dict(), default=str))
    fields = {"class": own.architecture, "drafts": speculation.num_speculative_tokens}
    if has_own_embedding(config):
        fields["embedding"] = "own"
    return {"draft": {**without_provenance(described), **fields}}
