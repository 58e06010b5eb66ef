"""vLLM's multi-head latent attention, which only engines of such models import."""

from __future__ import annotations

from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
