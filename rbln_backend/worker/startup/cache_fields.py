"""The part of a cache key that all graphs of one server share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch

from rbln_backend.config import RblnConfig
from rbln_backend.store.graph_sources import sources_digest
from rbln_backend.vllm_compat.surface import VLLM_VERSION, VllmConfig
from rbln_backend.worker.step.group_inputs import KvGroup

# Fields of a Hugging Face config that describe a model's origin, not its computation.
_PROVENANCE = frozenset(("_name_or_path", "transformers_version", "dtype", "torch_dtype"))


def cache_fields(config: VllmConfig, rbln: RblnConfig, groups: Sequence[KvGroup]) -> dict[str, Any]:
    """Return the fields besides device, phase and bucket that change a graph; weights do not."""
    model, parallel = config.model_config, config.parallel_config
    # Label maps have integer keys and some fields hold dtypes; JSON has neither.
    hf_config = json.loads(json.dumps(model.hf_config.to_dict(), default=str))
    return {
        "model": without_provenance(hf_config),
        # vLLM's class: some models can run in their own one or in a generic one.
        "architecture": model.architecture,
        "dtype": str(model.dtype),
        "quantization": _quantization_fields(config),
        "kv_dtype": config.cache_config.cache_dtype,
        "kv_groups": [dataclasses.asdict(group) for group in groups],
        "max_model_len": model.max_model_len,
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "data": parallel.data_parallel_size,
            "expert": parallel.enable_expert_parallel,
            "rank": parallel.rank,
            # Ranks may hold different numbers of experts.
            "data_rank": parallel.data_parallel_rank if parallel.enable_expert_parallel else 0,
        },
        "rbln": rbln.graph_fields(),
        "lora": _adapter_fields(config),
        **version_fields(),
    }


def version_fields() -> dict[str, str]:
    """Return the fields that identify the software that made a graph."""
    return {
        "torch": torch.__version__,
        "vllm": VLLM_VERSION,
        "backend_sources": sources_digest(),
    }


def without_provenance(config: Any) -> Any:
    """Return ``config`` without the fields that only describe its origin, at every depth."""
    if isinstance(config, dict):
        return {k: without_provenance(v) for k, v in config.items() if k not in _PROVENANCE}
    if isinstance(config, list):
        return [without_provenance(item) for item in config]
    return config


def _quantization_fields(config: VllmConfig) -> dict[str, Any] | None:
    """Return the quantisation format and its settings by layer."""
    if config.quant_config is None:
        return None
    # These are not always part of the model's own configuration.
    described = json.loads(json.dumps(vars(config.quant_config), default=str))
    return {"method": config.model_config.quantization, **described}


def _adapter_fields(config: VllmConfig) -> dict[str, Any] | None:
    lora = config.lora_config
    if lora is None:
        return None
    targets = None if lora.target_modules is None else sorted(lora.target_modules)
    return {"slots": lora.max_loras, "rank": lora.max_lora_rank, "targets": targets}
