"""Quantised experts that one op of the SDK computes: no rank of an NPU computes them singly."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from rbln_backend.graphs.operators import check_ops, offered
from rbln_backend.layers.experts import ExpertAdapters
from rbln_backend.layers.moe import Choice
from rbln_backend.layers.quantized_experts import BLOCKS_OP, Nvfp4Rows, RblnQuantizedMoEMethod
from rbln_backend.layers.schemes import Weights


class OneOpMoEMethod(RblnQuantizedMoEMethod):
    """A format whose experts an NPU computes by ``sdk_op``."""

    form: str
    """Name of the format."""

    def choose(self, layer: Any) -> None:
        """As ``RblnMoEMethod``; on an NPU the op of this format."""
        super().choose(layer)
        if not self.capabilities.packed_weights:
            check_ops(self.sdk_op)
            self.choice = Choice("glu", f"the SDK has an op for experts in {self.form}")


logger = logging.getLogger(__name__)

# The op's name of the format.
_E2M1 = "float4_e2m1fn"
_KEPT = ("weight", "weight_scale", "weight_scale_2")


class Nvfp4Experts:
    """Experts as an NPU keeps them: fields, scales of groups, scales of matrices."""

    adapters: ExpertAdapters | None = None

    def __init__(self, layer: Any, group: int, limits: Mapping[str, float | None]) -> None:
        """``limits``: further arguments of the op, as the installed one has them."""
        self._limits = limits
        self._w13 = [getattr(layer, f"w13_{part}") for part in _KEPT]
        self._w2 = [getattr(layer, f"w2_{part}") for part in _KEPT]
        self._group = group
        self.count: int = self._w2[0].shape[0]
        self._inner: int = layer.intermediate_size_per_partition
        self._activation: str = layer.activation.value

    def glu(self, x: Tensor, by_expert: Tensor, expert_map: Tensor | None) -> Tensor:
        both, both_scale, seconds = self._w13
        down, down_scale, down_second = self._w2
        inner = self._inner
        mixed: Tensor = torch.ops.rbln_custom_ops.custom_moe_glu_group_dequantize(
            x,
            both[:, :inner],
            both_scale[:, :inner],
            both[:, inner:],
            both_scale[:, inner:],
            down,
            down_scale,
            by_expert,
            torch.tensor(self._group, dtype=torch.int32),
            self._activation,
            None,
            None,
            None,
            expert_map,
            gate_proj_scale_2=seconds[:, 0].contiguous(),
            up_proj_scale_2=seconds[:, 1].contiguous(),
            down_proj_scale_2=down_second,
            weight_dtype=_E2M1,
            **self._limits,
        )
        return mixed


class RblnModelOptNvfp4MoEMethod(OneOpMoEMethod):
    """Experts with e2m1 weights; inputs have the model's dtype.

    vLLM's loader recognises the order of ModelOpt's tensors by the class's name.
    """

    form = "NVFP4"
    sdk_op = f"{BLOCKS_OP}.nvfp4"

    def __init__(self, moe: FusedMoEConfig, group_size: int) -> None:
        stored = Nvfp4Rows(
            Weights(bits=4, group_size=group_size, kind="nvfp4", published="NVFP4 W4A4")
        )
        super().__init__(moe, stored, stored)

    @staticmethod
    def uses_weight_scale_2_pattern() -> bool:
        """Scales of whole matrices are called ``weight_scale_2``; vLLM's loader calls this."""
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        """As ``RblnQuantizedMoEMethod``; logs what the emulated device keeps instead."""
        if self.capabilities.packed_weights:
            _log_expansion()
        super().process_weights_after_loading(layer)

    def packing_bytes(self, layer: Any) -> int:
        """As ``RblnQuantizedMoEMethod``: a byte for half of one, a float32 for an e4m3."""
        if not self.capabilities.packed_weights:
            return 0
        fields = layer.w13_weight.numel() + layer.w2_weight.numel()
        scales = layer.w13_weight_scale.numel() + layer.w2_weight_scale.numel()
        return int(fields + 3 * scales)

    def has_sdk_form(self, inner: int) -> bool:
        """As ``RblnQuantizedMoEMethod``; the op has biases, which ModelOpt's form has not.

        Limits of the activation came with SDK 0.12.1.
        """
        limits = {name: limit for name, limit in self._limits.items() if limit is not None}
        return not self.moe.has_bias and offered(self.sdk_op, **limits) == limits

    @property
    def _limits(self) -> dict[str, float | None]:
        names = ("swiglu_alpha", "swiglu_limit", "swiglu_beta")
        return {name: getattr(self.moe, name) for name in names}

    def keep_stored(self, layer: Any) -> None:
        """Keep fields and both kinds of scales; those of inputs are dropped."""
        for name in self._formats:
            del layer._parameters[f"{name}_input_scale"]
            for part in _KEPT:
                value = layer._parameters.pop(f"{name}_{part}").data
                parameter = nn.Parameter(value.contiguous(), requires_grad=False)
                layer.register_parameter(f"{name}_{part}", parameter)
            self._keep_bias(layer, f"{name}_bias")
        group = self._formats["w2"].quantized.group_size
        self.hold(layer, Nvfp4Experts(layer, group, offered(self.sdk_op, **self._limits)))


@cache
def _log_expansion() -> None:
    """Log once for a process."""
    logger.warning(
        "NVFP4 experts: the emulated device keeps a byte for each weight and a float32 for each "
        "group, about 2.2 times the size of their files"
    )
