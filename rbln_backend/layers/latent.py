"""Multi-head latent attention (DeepSeek-V2, V3): all heads over one compressed head.

vLLM's layer expands keys and values in prefill, with kernels of GPUs for both forms. Here one form
does for prefill and decode: a key of head h is ``K_h c`` of the compressed ``c`` and a value
``V_h c``, so a query against keys is ``K_h^T q`` against what is cached, and a sum of values is
``V_h`` times a sum of what is cached. A token's result is the same, bit for bit, whatever chunk or
batch it comes in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from rbln_backend.devices.emulated.kernel_set import packs_weights
from rbln_backend.devices.emulated.packing import pack, packed_shape
from rbln_backend.devices.port import device_capabilities
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.graphs.operators import check_ops, offered
from rbln_backend.layers.attention import PagedMetadata, RblnAttentionBackend
from rbln_backend.limits import KV_DTYPE, MLA, SPARSE_ATTENTION
from rbln_backend.settings import configured


class AbsorbedProjection(QuantizeMethodBase):
    """Takes the place of ``method`` of a linear layer [H * (key_size + value_size), C].

    The weight is loaded as ``method`` has it, and afterwards kept as two stacks alone: parameters
    ``to_latent`` and ``to_value`` of the layer.
    """

    def __init__(self, method: QuantizeMethodBase, key_size: int, value_size: int) -> None:
        self._method = method
        self.key_size, self.value_size = key_size, value_size

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self._method.create_weights(layer, *args, **kwargs)

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Not called: ``absorb`` [..., H, C] and ``get_values`` [..., H, V] are the products."""
        raise NotImplementedError("the projection is absorbed into queries and results")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weight by heads, in the layout of the active kernels."""
        self._method.process_weights_after_loading(layer)
        by_head = self._plain_weight(layer).unflatten(0, (-1, self.key_size + self.value_size))
        keys, values = by_head.split([self.key_size, self.value_size], dim=1)
        self.latent_size = by_head.shape[2]
        for name in list(layer._parameters):
            layer.register_parameter(name, None)
        for name, stack in (("to_latent", keys.transpose(1, 2)), ("to_value", values)):
            kept = nn.Parameter(_prepared(stack), requires_grad=False)
            layer.register_parameter(name, kept)

    def absorb(self, layer: Any, queries: Tensor) -> Tensor:
        """queries [..., H, key_size] to [..., H, C]."""
        return _multiply(queries, layer.to_latent, self.latent_size)

    def get_values(self, layer: Any, latents: Tensor) -> Tensor:
        """Sums of what is cached, [..., H, C], to [..., H, value_size]."""
        return _multiply(latents, layer.to_value, self.value_size)

    def _plain_weight(self, layer: Any) -> Tensor:
        """[H * (key_size + value_size), C] in the model's dtype, whatever holds it."""
        if isinstance(self._method, UnquantizedLinearMethod):
            weight: Tensor = layer.weight.data
            return weight
        unit = torch.eye(layer.input_size, dtype=layer.params_dtype)
        columns: Tensor = self._method.apply(layer, unit)
        return columns.t()


def _prepared(stack: Tensor) -> Tensor:
    """[H, N, K] as ``_multiply`` reads it, so that graphs compute nothing of weights alone."""
    if not packs_weights():
        # The axes of the vendor's weights: vllm-rbln 0.12, ``patches/mla.py``.
        return stack.transpose(1, 2).unsqueeze(0).contiguous()
    packed = stack.new_empty((stack.shape[0], *packed_shape(stack.dtype, *stack.shape[1:])))
    for target, matrix in zip(packed, stack, strict=True):
        target.copy_(pack(matrix))
    return packed


def _multiply(x: Tensor, stack: Tensor, width: int) -> Tensor:
    """x [..., H, K] by the matrix of each head; kernels take rows [T, H, K] alone.

    ``stack``: packed, or [1, H, K, width].
    """
    if packs_weights():
        product: Tensor = torch.ops.rbln_emulator.linear_heads(x, stack, width)
        return product
    product = torch.matmul(x.transpose(-3, -2), stack).transpose(-3, -2)
    return product if x.dim() > 3 else product.squeeze(0)


SDK_SIZES = (512, 64)
"""Compressed and rotated numbers of a token that the SDK's ops take (vllm-rbln 0.12)."""


class LatentAttentionImpl:
    """Tensors of a layer that graphs bind by name."""

    alibi_slopes = None

    def __init__(self, scale: float) -> None:
        self.scale_tensor = torch.tensor(scale, dtype=torch.float32)


class LatentAttention(MultiHeadLatentAttentionWrapper, AttentionLayerBase):
    """vLLM's layer of the same sub-modules, which are their owner's; traced into the graph."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        non_causal_multi_token_decode: bool = False,
        **_: Any,
    ) -> None:
        """Make the layer; ignored arguments belong to sparse attention or GPU fusion.

        Raises ``UnsupportedModelError`` for sparse attention, drafts, and other sizes on an NPU.
        """
        nn.Module.__init__(self)
        config = get_current_vllm_config()
        rbln = configured(config)
        if mla_modules.is_sparse:
            raise SPARSE_ATTENTION.refusal(prefix)
        if non_causal_multi_token_decode:
            raise MLA.refusal(prefix)
        sizes = (kv_lora_rank, qk_rope_head_dim)
        device = device_capabilities(rbln)
        self._on_npu = not device.general_attention
        if self._on_npu and sizes != SDK_SIZES:
            raise MLA.refusal(f"{prefix}: {kv_lora_rank} compressed and {qk_rope_head_dim} rotated")
        if self._on_npu:
            check_ops(*map(_sdk_name, (True, False)))
            self._later = {
                name: offered(name, is_prompt_sorted=device.longest_first)
                for name in map(_sdk_name, (True, False))
            }
        if getattr(quant_config, "kv_cache_scheme", None) and cache_config.cache_dtype == "auto":
            raise KV_DTYPE.refusal(f"{prefix}, kv_cache_scheme of the checkpoint")
        if rbln.use_custom_kernel:
            raise UnsupportedModelError(
                "the custom attention kernels take no compressed keys; unset RBLN_USE_CUSTOM_KERNEL"
            )
        self.num_heads, self.v_head_dim = num_heads, v_head_dim
        self.q_sizes = [qk_nope_head_dim, qk_rope_head_dim]
        self.kv_sizes = [kv_lora_rank, qk_rope_head_dim]
        self.q_lora_rank = q_lora_rank
        # Modules of one layer or another, each with its own arguments.
        self._parts: Any = mla_modules
        projected: Any = self._parts.kv_b_proj
        self._projection = AbsorbedProjection(projected.quant_method, qk_nope_head_dim, v_head_dim)
        projected.quant_method = self._projection
        self.impl: Any = LatentAttentionImpl(scale)
        self.kv_cache = torch.tensor([])
        self.layer_name = f"{prefix}.attn"
        config.compilation_config.static_forward_context[self.layer_name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RblnAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        """One head of what is cached of a token."""
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=sum(self.kv_sizes),
            dtype=dtype,
        )

    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        """positions [...], hidden_states [..., hidden_size] to the same: rows, or [B, L] of them
        on an NPU.
        """
        parts, heads = self._parts, self.num_heads
        # The queries of all heads and what is to be cached, before norm and rotation.
        if self.q_lora_rank is None:
            q, latent = parts.q_proj(hidden_states)[0], parts.kv_a_proj_with_mqa(hidden_states)[0]
        else:
            both = parts.fused_qkv_a_proj(hidden_states)[0]
            q_c, latent = both.split([self.q_lora_rank, sum(self.kv_sizes)], dim=-1)
            q = parts.q_b_proj(parts.q_a_layernorm(q_c))[0]
        kv_c, k_pe = latent.split(self.kv_sizes, dim=-1)
        q_nope, q_pe = q.view(*q.shape[:-1], heads, -1).split(self.q_sizes, dim=-1)
        if parts.rotary_emb is not None:
            q_pe, k_pe = parts.rotary_emb(positions, q_pe, k_pe.unsqueeze(-2))
            k_pe = k_pe.view(*kv_c.shape[:-1], -1)
        absorbed = self._projection.absorb(parts.kv_b_proj, q_nope)
        queries = torch.cat((absorbed, q_pe), dim=-1)
        if llama_4_scaling is not None:
            queries = (queries * llama_4_scaling).to(q.dtype)
        mixed = self._attend(queries, parts.kv_a_layernorm(kv_c), k_pe)
        values = self._projection.get_values(parts.kv_b_proj, mixed)
        attended = values.reshape(*kv_c.shape[:-1], heads * self.v_head_dim)
        if parts.g_proj is not None:
            attended = attended * parts.g_proj(hidden_states)[0].sigmoid()
        output: Tensor = parts.o_proj(attended)[0]
        return output

    def _attend(self, queries: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """queries [..., H, C + R], kv_c [..., C], k_pe [..., R] to [..., H, C]."""
        metadata: Any = get_forward_context().attn_metadata
        own = metadata[self.layer_name]
        assert isinstance(own, PagedMetadata)
        mixed: Tensor
        if self._on_npu:
            name = _sdk_name(own.is_prefill)
            mixed = getattr(torch.ops.rbln_custom_ops, name)(
                queries.transpose(1, 2),
                kv_c,
                k_pe,
                self.kv_cache,
                own.seq_idx,
                own.block_tables,
                self.impl.scale_tensor,
                **self._later[name],
            )
            return mixed.transpose(1, 2)
        mixed = torch.ops.rbln_emulator.latent_attention(
            queries,
            kv_c,
            k_pe,
            self.kv_cache,
            self.impl.scale_tensor,
            own.seq_idx,
            own.block_tables,
            own.batch_size,
            own.query_counts,
        )
        return mixed


def _sdk_name(is_prefill: bool) -> str:
    return f"paged_flash_causal_mla_naive_{'prefill' if is_prefill else 'decode'}"


def install() -> None:
    """Register the layer with vLLM; idempotent, once per process."""
    wrapper = MultiHeadLatentAttentionWrapper
    if LatentAttention.__dict__.get("name") is None:
        wrapper.register_oot(name=wrapper.__name__)(LatentAttention)
