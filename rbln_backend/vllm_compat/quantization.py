"""vLLM's names behind quantised weights; apart, because importing them takes a while.

They bring vLLM's expert layers and the compressed-tensors package with them, which a server of
plain weights never needs.
"""

from __future__ import annotations

from vllm.model_executor.kernels.linear import (
    MPLinearKernel,
    MPLinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_gptq import (
    AutoGPTQConfig,
    AutoGPTQLinearMethod,
    get_moe_quant_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import PlatformEnum

__all__ = [
    "AutoGPTQConfig",
    "AutoGPTQLinearMethod",
    "CompressedTensorsConfig",
    "FusedMoEConfig",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "ParallelLMHead",
    "PlatformEnum",
    "QuantizeMethodBase",
    "RoutedExperts",
    "VocabParallelEmbedding",
    "get_linear_quant_method",
    "get_moe_quant_method",
    "register_linear_kernel",
    "register_quantization_config",
    "set_weight_attrs",
]
