"""The sizes of the default model, and the configuration files that tell them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama model; the names are those of the Hugging Face configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 2048

    def config(self, token_ids: dict[str, int]) -> dict[str, Any]:
        """Return config.json; `token_ids` has bos_token_id, eos_token_id and pad_token_id."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            **token_ids,
        }
