"""Multi-head latent attention (DeepSeek-V2, V3): all heads over one compressed head.

vLLM's layer expands keys and values in prefill, with kernels of GPUs for both forms. Here one form
does for prefill and decode: queries are brought into the space of what is cached (``absorbed``),
which is the key of every head and, but for its rotated part, the value. So a token's result is the
same, bit for bit, whatever chunk or batch it comes in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.attention.absorbed import AbsorbedProjection
from rbln_backend.attention.backend import RblnAttentionBackend
from rbln_backend.attention.metadata import PagedMetadata
from rbln_backend.devices.port import device_capabilities
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.graphs.operators import check_ops, offered
from rbln_backend.unsupported import KV_DTYPE, MLA, SPARSE_ATTENTION
from rbln_backend.vllm_compat.latent import MLAModules, MultiHeadLatentAttentionWrapper
from rbln_backend.vllm_compat.surface import (
    AttentionBackend,
    AttentionLayerBase,
    MLAAttentionSpec,
    VllmConfig,
    configured,
    get_current_vllm_config,
    get_forward_context,
)

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
        """The backend of all other layers."""
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
        q, latent = self._down_projected(hidden_states)
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
        values = self._projection.values_of(parts.kv_b_proj, mixed)
        attended = values.reshape(*kv_c.shape[:-1], heads * self.v_head_dim)
        if parts.g_proj is not None:
            attended = attended * parts.g_proj(hidden_states)[0].sigmoid()
        output: Tensor = parts.o_proj(attended)[0]
        return output

    def _down_projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The queries of all heads and what is to be cached, before norm and rotation."""
        parts = self._parts
        if self.q_lora_rank is None:
            return parts.q_proj(hidden_states)[0], parts.kv_a_proj_with_mqa(hidden_states)[0]
        both = parts.fused_qkv_a_proj(hidden_states)[0]
        q_c, latent = both.split([self.q_lora_rank, sum(self.kv_sizes)], dim=-1)
        return parts.q_b_proj(parts.q_a_layernorm(q_c))[0], latent

    def _attend(self, queries: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """queries [..., H, C + R], kv_c [..., C], k_pe [..., R] to [..., H, C]."""
        metadata: Any = get_forward_context().attn_metadata
        own = metadata[self.layer_name]
        assert isinstance(own, PagedMetadata)
        if self._on_npu:
            return self._attend_on_npu(own, queries, kv_c, k_pe)
        mixed: Tensor = torch.ops.rbln_emulator.latent_attention(
            *(queries, kv_c, k_pe, self.kv_cache, self.impl.scale_tensor),
            *(own.seq_idx, own.block_tables, own.batch_size, own.query_counts),
        )
        return mixed

    def _attend_on_npu(
        self, own: PagedMetadata, queries: Tensor, kv_c: Tensor, k_pe: Tensor
    ) -> Tensor:
        """As ``_attend``, [B, L, H, C + R] to [B, L, H, C], by the SDK's op."""
        name = _sdk_name(own.is_prefill)
        mixed: Tensor = getattr(torch.ops.rbln_custom_ops, name)(
            *(queries.transpose(1, 2), kv_c, k_pe, self.kv_cache),
            *(own.seq_idx, own.block_tables, self.impl.scale_tensor),
            **self._later[name],
        )
        return mixed.transpose(1, 2)


def _sdk_name(is_prefill: bool) -> str:
    return f"paged_flash_causal_mla_naive_{'prefill' if is_prefill else 'decode'}"


def install() -> None:
    """Register the layer with vLLM; idempotent, once per process."""
    wrapper = MultiHeadLatentAttentionWrapper
    if LatentAttention.__dict__.get("name") is None:
        wrapper.register_oot(name=wrapper.__name__)(LatentAttention)
