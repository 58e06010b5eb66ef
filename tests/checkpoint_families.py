"""The model families of which the tests make tiny members.

A family is data: which classes of transformers it has, and which fields of its configuration make
a member that shows what is particular about it (a partial rotation, a cap, a mix of windows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers

from tests.checkpoint_tokenizer import VOCAB_SIZE

LAYERS = 2
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family's classes, particular fields and factors."""

    config_class: str
    model_class: str
    fields: Mapping[str, Any]
    """Fields of the configuration on top of ``SIZES``; ``...`` leaves a field of ``SIZES`` out."""
    embedding_multiplier: float = 1.0
    """What the model multiplies the embeddings of its tokens by."""
    logit_multiplier: float = 1.0
    """What the model multiplies the output of its head by."""
    head_norm: float = 1.5
    """Gain of the norms of queries and keys; it sets the spread of the attention scores."""

    def config(self, **overrides: Any) -> Any:
        """The configuration of the tiny member, with ``overrides`` replacing fields."""
        fields = {**SIZES, **self.fields, **overrides}
        kept = {name: value for name, value in fields.items() if value is not ...}
        return getattr(transformers, self.config_class)(**kept)

    def model(self, config: Any) -> Any:
        """A model of this family, with the weights that transformers initialises it with."""
        return getattr(transformers, self.model_class)(config)


def _family(name: str, *, times: tuple[float, float] = (1.0, 1.0), **fields: Any) -> Family:
    """A family with the usual class names; ``times`` are its embedding and logit multipliers."""
    return Family(
        config_class=f"{name}Config",
        model_class=f"{name}ForCausalLM",
        fields=fields,
        embedding_multiplier=times[0],
        logit_multiplier=times[1],
    )


def _mixed(window: int) -> dict[str, Any]:
    """Four layers, of which the first and the third look back ``window`` tokens."""
    kinds = [SLIDING, FULL, SLIDING, FULL]
    return {"num_hidden_layers": 4, "sliding_window": window, "layer_types": kinds}


# Gemma multiplies its embeddings by the square root of their width.
_GEMMA = {"times": (SIZES["hidden_size"] ** 0.5, 1.0), "tie_word_embeddings": True}
_MULTI_HEAD = {"num_key_value_heads": 4}
_GPT2 = {"activation_function": "gelu_new", "tie_word_embeddings": True}
_COHERE = {"times": (1.0, 0.25), "logit_scale": 0.25, "tie_word_embeddings": True}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
# One factor for each pair of the 24 dimensions that rotate.
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0 + 0.1 * pair for pair in range(12)],
    "long_factor": [2.0 + 0.2 * pair for pair in range(12)],
}

REQUIRED: Mapping[str, Family] = {
    "llama": _family("Llama"),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3"),
    "mistral": _family("Mistral", sliding_window=40),
    "mistral_full": _family("Mistral", sliding_window=None),
    "phi3": _family("Phi3"),
    "gemma2": _family(
        "Gemma2",
        **_GEMMA,
        **_mixed(48),
        query_pre_attn_scalar=32,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3_text": replace(
        _family(
            "Gemma3",
            **_GEMMA,
            **_mixed(48),
            query_pre_attn_scalar=32,
            rope_parameters={
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        config_class="Gemma3TextConfig",
    ),
    "starcoder2": _family("Starcoder2", sliding_window=32, tie_word_embeddings=True),
    "exaone4": _family("Exaone4", **_mixed(48)),
    "olmo3": _family("Olmo3", **_mixed(24)),
    "granite": _family(
        "Granite",
        times=(3.0, 1 / 8),
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.125,
        logits_scaling=8.0,
    ),
    "opt": _family("OPT", ffn_dim=256, tie_word_embeddings=True, **_MULTI_HEAD),
    "gpt_neox": _family("GPTNeoX", **_MULTI_HEAD),
}

OTHERS: Mapping[str, Family] = {
    "gemma": _family("Gemma", **_GEMMA),
    "qwen2_window": _family(
        "Qwen2", use_sliding_window=True, sliding_window=48, layer_types=[SLIDING] * 2
    ),
    "llama_tied": _family("Llama", tie_word_embeddings=True),
    "llama3": _family("Llama", rope_parameters=_LLAMA3_ROPE),
    "qwen3_yarn": _family("Qwen3", rope_parameters=_YARN_ROPE),
    "phi3_longrope": _family(
        "Phi3", rope_parameters=_LONGROPE, original_max_position_embeddings=512
    ),
    "olmo": _family("Olmo", clip_qkv=3.0),
    "olmo2": _family("Olmo2"),
    "stablelm": _family("StableLm", use_qkv_bias=True),
    "cohere": _family("Cohere", **_COHERE, use_qk_norm=True),
    "cohere2": _family("Cohere2", **_COHERE, **_mixed(48)),
    "smollm3": _family("SmolLM3", num_hidden_layers=4),
    "nemotron": _family("Nemotron", times=(1.0, 2.0)),
    "glm": _family("Glm"),
    "glm4": _family("Glm4"),
    "ernie4_5": _family("Ernie4_5"),
    "seed_oss": _family("SeedOss", attention_dropout=0.0, residual_dropout=0.0),
    "hunyuan_v1_dense": _family("HunYuanDenseV1"),
    "arcee": _family("Arcee"),
    "phi": _family("Phi", intermediate_size=512, **_MULTI_HEAD),
    "gpt2": replace(_family("GPT2", **_GPT2, **_MULTI_HEAD), model_class="GPT2LMHeadModel"),
    "gptj": _family("GPTJ", rotary_dim=16, activation_function="gelu_new", **_MULTI_HEAD),
    "gpt_bigcode": _family("GPTBigCode", **_GPT2, num_key_value_heads=1),
    "falcon": _family("Falcon", head_dim=..., bias=True, tie_word_embeddings=True),
    "falcon_new": _family(
        "Falcon", head_dim=..., new_decoder_architecture=True, num_kv_heads=2, bias=False
    ),
    # Biases by the distance of a key instead of positions.
    "falcon_rw": _family(
        "Falcon", head_dim=..., alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "bloom": _family("Bloom", head_dim=..., tie_word_embeddings=True, **_MULTI_HEAD),
    "internlm3": replace(_family("InternLM3"), model_class="LlamaForCausalLM"),
    "jais2": _family("Jais2"),
    "hyperclovax": _family("HyperCLOVAX", attention_multiplier=0.125),
    "cwm": _family("Cwm", **_mixed(48), rope_parameters=_LLAMA3_ROPE),
    "minicpm3": _family(
        "MiniCPM3",
        times=(12.0, 0.5),
        dim_model_base=64,
        kv_lora_rank=48,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        head_dim=...,
        **_MULTI_HEAD,
    ),
    "gemma4_text": replace(
        _family(
            "Gemma4",
            **_GEMMA,
            **_mixed(48),
            global_head_dim=64,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB_SIZE,
        ),
        config_class="Gemma4TextConfig",
        # It does not divide the scores by anything.
        head_norm=0.6,
    ),
    # The last two layers read what the first two have cached, one of which slides.
    "gemma3n_text": replace(
        _family(
            "Gemma3n",
            **(_GEMMA | _mixed(48)),
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB_SIZE,
            laurel_rank=8,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0],
            # vLLM leaves out a factor before a norm, which counts where embeddings are this small.
            rms_norm_eps=1e-12,
        ),
        config_class="Gemma3nTextConfig",
        head_norm=0.6,
    ),
    "gemma4_shared": replace(
        _family(
            "Gemma4",
            **_GEMMA,
            **_mixed(48),
            num_kv_shared_layers=2,
            global_head_dim=64,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB_SIZE,
        ),
        config_class="Gemma4TextConfig",
        # It does not divide the scores by anything.
        head_norm=0.6,
    ),
    "iquestcoder": replace(_family("IQuestCoder"), model_class="LlamaForCausalLM"),
    "ministral": _family("Ministral", **_mixed(48)),
    "ministral3": _family(
        "Ministral3", rope_parameters={**_YARN_ROPE, "llama_4_scaling_beta": 0.1}
    ),
    "granite_swa": _family("GraniteSWA", **_mixed(48), attention_multiplier=0.18),
    "vaultgemma": _family("VaultGemma", **_GEMMA, **_mixed(48), query_pre_attn_scalar=32),
    "helium": _family("Helium"),
    "persimmon": _family("Persimmon", **_MULTI_HEAD),
    "nanochat": _family("NanoChat"),
}

_LATENT: Mapping[str, Any] = {
    **_MULTI_HEAD,
    "head_dim": ...,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 80,
}

MIXTURES: Mapping[str, Family] = {
    "gpt_oss": _family(
        "GptOss",
        **_mixed(48),
        num_local_experts=6,
        num_experts_per_tok=3,
        intermediate_size=80,
        rope_parameters={**_YARN_ROPE, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "mixtral": _family("Mixtral", num_local_experts=6, num_experts_per_tok=2),
    "qwen2_moe": _family(
        "Qwen2Moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=80,
        shared_expert_intermediate_size=96,
    ),
    "qwen3_moe": _family(
        "Qwen3Moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=80,
        norm_topk_prob=True,
    ),
    "olmoe": _family(
        "Olmoe", num_experts=8, num_experts_per_tok=3, intermediate_size=80, **_MULTI_HEAD
    ),
    "granitemoe": _family(
        "GraniteMoe", num_local_experts=8, num_experts_per_tok=3, intermediate_size=80
    ),
    # Sigmoid scores in groups, a bias that chooses but does not weigh, a factor, a shared expert.
    "glm4_moe": _family(
        "Glm4Moe",
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        moe_intermediate_size=80,
        use_qk_norm=True,
    ),
    "dots1": _family(
        "Dots1",
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.0,
        norm_topk_prob=True,
        moe_intermediate_size=80,
    ),
    # Latent attention; softmax scores, the best of each group speaks for it; shared experts.
    "deepseek_v2": _family(
        "DeepseekV2", **_LATENT, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1
    ),
    "deepseek_v2_groups": _family(
        "DeepseekV2",
        **_LATENT,
        q_lora_rank=40,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        rope_parameters={**_YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek_v3": _family(
        "DeepseekV3",
        **_LATENT,
        q_lora_rank=40,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
    ),
    # A chunk of the context in some layers, no positions in the others; weights on inputs.
    "llama4": replace(
        _family(
            "Llama4",
            num_hidden_layers=4,
            no_rope_layers=[1, 0, 1, 0],
            attention_chunk_size=40,
            floor_scale=32,
            attn_scale=0.5,
            interleave_moe_layer_step=2,
            intermediate_size=80,
            intermediate_size_mlp=256,
            num_local_experts=6,
            num_experts_per_tok=1,
        ),
        config_class="Llama4TextConfig",
    ),
    # Softmax scores with such a bias.
    "ernie4_5_moe": _family(
        "Ernie4_5_Moe",
        moe_num_experts=8,
        moe_k=3,
        moe_num_shared_experts=1,
        moe_intermediate_size=80,
        tie_word_embeddings=True,
    ),
    "minimax_m2": _family(
        "MiniMaxM2",
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=80,
        rotary_dim=16,
        scoring_func="sigmoid",
        use_routing_bias=True,
    ),
}

FAMILIES: Mapping[str, Family] = {**REQUIRED, **OTHERS, **MIXTURES}
