"""gpt-oss as published: experts in MXFP4, everything else in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.moe.experts import SWIGLU_ALPHA, SWIGLU_LIMIT
from rbln_backend.quantization.expert_formats import Mxfp4Rows
from rbln_backend.quantization.sdk.one_op_experts import OneOpExperts, OneOpMoEMethod
from rbln_backend.quantization.weights import Weights
from rbln_backend.vllm_compat.quantization import FusedMoEConfig, GptOssMxfp4Config

# Weights that share an exponent, by the Open Compute Project's MX specification.
_BLOCK = 32
# As vllm-rbln 0.12 checks it (quantization/mxfp4.py).
_SDK_COLUMNS = 64


class Mxfp4Experts(OneOpExperts):
    """Experts of e2m1 as an NPU keeps them: blocks, scales and biases of three projections."""

    form = "MXFP4"

    def __init__(self, layer: Any) -> None:
        self._parts = [
            getattr(layer, f"{part}_proj_{kind}")
            for part in ("gate", "up", "down")
            for kind in ("blocks", "scales", "bias")
        ]
        self.count: int = self._parts[0].shape[0]

    def glu(self, x: Tensor, by_expert: Tensor, expert_map: Tensor | None) -> Tensor:
        """As ``GluExperts``: x [T, H] to [T, H]."""
        alpha = torch.tensor(SWIGLU_ALPHA, dtype=torch.float32)
        limit = torch.tensor(SWIGLU_LIMIT, dtype=torch.float32)
        mixed: Tensor = torch.ops.rbln_custom_ops.custom_moe_glu_mxfp4(
            x, *self._parts, by_expert, alpha, limit, expert_map
        )
        return mixed


class RblnMxfp4MoEMethod(OneOpMoEMethod):
    """Experts of a gpt-oss checkpoint."""

    weight_dtype = "gpt_oss_mxfp4"
    """Name that the model's own loader requires."""

    form = "MXFP4"
    sdk_op = "custom_moe_glu_mxfp4"

    def __init__(self, moe: FusedMoEConfig) -> None:
        stored = Mxfp4Rows(Weights(bits=4, group_size=_BLOCK, kind="float"))
        super().__init__(moe, stored, stored)

    def has_sdk_form(self, inner: int) -> bool:
        """As ``RblnQuantizedMoEMethod``; vllm-rbln 0.12 requires 64 columns and biases."""
        return inner % _SDK_COLUMNS == 0 and bool(self.moe.has_bias)

    def keep_stored(self, layer: Any) -> None:
        """Keep fields and exponents; gate and up rows alternate in a checkpoint."""
        for source, target in (("weight", "blocks"), ("weight_scale", "scales"), ("bias", "bias")):
            both = layer._parameters.pop(f"w13_{source}").data
            down = layer._parameters.pop(f"w2_{source}").data
            rows = {"gate": both[:, ::2], "up": both[:, 1::2], "down": down}
            for part, value in rows.items():
                parameter = nn.Parameter(value.contiguous(), requires_grad=False)
                layer.register_parameter(f"{part}_proj_{target}", parameter)
        for name in ("w13_bias", "w2_bias"):
            # vLLM's description of the layer reads them.
            layer.register_parameter(name, None)
        self.hold(layer, Mxfp4Experts(layer))


class RblnMxfp4Config(GptOssMxfp4Config):
    """As upstream, with a method of our own for experts."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Upstream's, and the others that there are kernels for."""
        return [torch.float32, torch.float16, *super().get_supported_act_dtypes()]

    def _make_moe_method(self, moe: FusedMoEConfig) -> RblnMxfp4MoEMethod:
        return RblnMxfp4MoEMethod(moe)
