"""Token embeddings of tensor-parallel ranks on an NPU: each rank has the whole table.

So a graph needs neither a mask of tokens nor a collective to look them up, as in vllm-rbln 0.12
(``model_executor/layers/vocab_parallel_embedding.py``). LM heads stay shared out among ranks.
"""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rbln_backend.devices.port import device_capabilities
from rbln_backend.settings import configured


class RblnEmbedding(VocabParallelEmbedding):
    """vLLM's layer, whole on an NPU unless it is the LM head as well."""

    def __init__(self, *args: Any, disable_tp: bool = False, **options: Any) -> None:
        config = get_current_vllm_config()
        on_npu = not device_capabilities(configured(config)).runs_on_host
        is_whole = disable_tp or (on_npu and not _is_head(config))
        super().__init__(*args, disable_tp=is_whole, **options)


def _is_head(config: VllmConfig) -> bool:
    """Of the served model too: a draft model reads its embedding."""
    models: list[ModelConfig | None] = [config.model_config]
    if config.speculative_config is not None:
        models.append(config.speculative_config.target_model_config)
    return any(getattr(x.hf_text_config, "tie_word_embeddings", False) for x in models if x)


def install_embedding() -> None:
    """Register the layer with vLLM; idempotent, once per process."""
    if RblnEmbedding.__dict__.get("name") is None:
        VocabParallelEmbedding.register_oot(name=VocabParallelEmbedding.__name__)(RblnEmbedding)
