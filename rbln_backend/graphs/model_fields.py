"""Fields that identify a model's computation: configuration, dtypes and software, not weights."""

from __future__ import annotations

import json
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig

from rbln_backend.config import RblnConfig
from rbln_backend.graphs.cache import sources_digest

# Fields of a Hugging Face config that describe a model's origin, not its computation.
_PROVENANCE = frozenset(("_name_or_path", "transformers_version", "dtype", "torch_dtype"))


def model_fields(config: VllmConfig, rbln: RblnConfig) -> dict[str, Any]:
    """Return the fields that change what a model computes, besides its weights and the device."""
    model = config.model_config
    # Label maps have integer keys and some fields hold dtypes; JSON has neither.
    hf_config = json.loads(json.dumps(model.hf_config.to_dict(), default=str))
    quantization = None
    if config.quant_config is not None:
        # Its settings by layer are not always part of the model's own configuration.
        described = json.loads(json.dumps(vars(config.quant_config), default=str))
        quantization = {"method": model.quantization, **described}
    return {
        "model": without_provenance(hf_config),
        # vLLM's class: some models can run in their own one or in a generic one.
        "architecture": model.architecture,
        "dtype": str(model.dtype),
        "quantization": quantization,
        "kv_dtype": config.cache_config.cache_dtype,
        "max_model_len": model.max_model_len,
        "rbln": rbln.graph_fields(),
        **version_fields(),
    }


def version_fields() -> dict[str, str]:
    """Return the fields that identify the software that made a graph."""
    return {
        "torch": torch.__version__,
        "vllm": str(vllm.__version__),
        "backend_sources": sources_digest(),
    }


def without_provenance(config: Any) -> Any:
    """Return ``config`` without the fields that only describe its origin, at every depth."""
    if isinstance(config, dict):
        return {k: without_provenance(v) for k, v in config.items() if k not in _PROVENANCE}
    if isinstance(config, list):
        return [without_provenance(item) for item in config]
    return config
