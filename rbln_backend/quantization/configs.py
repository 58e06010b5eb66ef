"""vLLM's readers of quantised checkpoints, narrowed to what this backend multiplies by.

vLLM's registries of quantisation configs and of linear kernels are open to platforms: nothing is
replaced but entries of the first. Names, files and weight loading stay upstream's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from torch import nn

from rbln_backend.quantization.awq import RblnAwqConfig
from rbln_backend.quantization.byte_linear import RblnByteScheme
from rbln_backend.quantization.compressed_tensors import RblnCompressedTensorsConfig
from rbln_backend.quantization.experts import RblnQuantizedMoEMethod
from rbln_backend.quantization.fp8 import (
    RblnFp8Config,
    RblnModelOptConfig,
    RblnModelOptMixedConfig,
)
from rbln_backend.quantization.gptq import RblnGptqConfig
from rbln_backend.quantization.linear import RblnWna16LinearKernel
from rbln_backend.quantization.mxfp4 import RblnMxfp4Config
from rbln_backend.quantization.schemes import (
    AWQ,
    COMPRESSED_TENSORS,
    FP8,
    GPTQ,
    MODELOPT,
    MODELOPT_MIXED,
    MXFP4,
)
from rbln_backend.vllm_compat.quantization import (
    PlatformEnum,
    register_linear_kernel,
    register_quantization_config,
)

_CONFIGS: Mapping[str, Any] = {
    COMPRESSED_TENSORS: RblnCompressedTensorsConfig,
    GPTQ: RblnGptqConfig,
    AWQ: RblnAwqConfig,
    FP8: RblnFp8Config,
    MXFP4: RblnMxfp4Config,
    MODELOPT: RblnModelOptConfig,
    MODELOPT_MIXED: RblnModelOptMixedConfig,
}
_HOLDERS = (RblnWna16LinearKernel, RblnByteScheme)


@cache
def register() -> None:
    """Register the configurations above with vLLM in this process; idempotent."""
    register_linear_kernel(RblnWna16LinearKernel, PlatformEnum.OOT)
    for name, config in _CONFIGS.items():
        register_quantization_config(name)(config)


def quantized_layers(model: nn.Module) -> list[str]:
    """Return the formats of quantized layers in the model's order; experts count as one."""
    return [held for layer in model.modules() for held in _held_by(layer)]


def _held_by(layer: nn.Module) -> Iterator[str]:
    method = getattr(layer, "quant_method", None)
    if isinstance(method, RblnQuantizedMoEMethod):
        yield str(method)
        return
    # The method knows, or holds the kernel, or the layer the scheme, which may have a kernel.
    scheme = getattr(layer, "scheme", None)
    holders = (method, getattr(method, "kernel", None), scheme, getattr(scheme, "kernel", None))
    yield from (str(h.weights) for h in holders if isinstance(h, _HOLDERS))
