"""gpt-oss as published: experts in MXFP4, everything else in bfloat16."""

from __future__ import annotations

import torch

from rbln_backend.quantization.expert_formats import Mxfp4Rows
from rbln_backend.quantization.experts import RblnQuantizedMoEMethod
from rbln_backend.quantization.weights import Weights
from rbln_backend.vllm_compat.quantization import FusedMoEConfig, GptOssMxfp4Config

# Weights that share an exponent, by the Open Compute Project's MX specification.
_BLOCK = 32


class RblnMxfp4MoEMethod(RblnQuantizedMoEMethod):
    """Experts of a gpt-oss checkpoint."""

    weight_dtype = "gpt_oss_mxfp4"
    """Name that the model's own loader requires."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        stored = Mxfp4Rows(Weights(bits=4, group_size=_BLOCK, kind="float"))
        super().__init__(moe, stored, stored)


class RblnMxfp4Config(GptOssMxfp4Config):
    """As upstream, with a method of our own for experts."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Upstream's, and the others that there are kernels for."""
        return [torch.float32, torch.float16, *super().get_supported_act_dtypes()]

    def _make_moe_method(self, moe: FusedMoEConfig) -> RblnMxfp4MoEMethod:
        return RblnMxfp4MoEMethod(moe)
