"""The families that are read from GGUF: what llama.cpp calls their tensors, and their keys.

The names are those of llama.cpp's gguf-py (`constants.py`), the values that no key tells those of
its model code: the pattern of Gemma's windows, its caps, and the scale of its 27B models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.keys import ModelKeys
from rbln_backend.gguf.reader import GgufFile
from rbln_backend.gguf.rope import rope_parameters

Config = dict[str, Any]

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {**_ATTENTION, **_MLP, **_TWO_NORMS}
_FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    **_TWO_NORMS,
}
EMBEDDING = "token_embd.weight"
_MAX_HEAD = 1 << 16
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of llama.cpp as a model type of transformers."""

    model_type: str
    layer: Mapping[str, str]
    """Parts of a layer, as the file and as transformers call them."""
    extra: Callable[[GgufFile, ModelKeys, Config], Config] = lambda _file, _keys, _config: {}
    """Fields of the configuration besides those of `common_config`."""
    permuted: bool = False
    """True if rows of queries and keys lie in llama.cpp's rotary order."""
    norms_plus_one: bool = False
    embeds_blocks: bool = True
    """True if vLLM's model supports embeddings other than a plain table."""

    def config(self, file: GgufFile, keys: ModelKeys) -> Config:
        """Return the fields of transformers' configuration. Raises `CheckpointError`."""
        config = common_config(file, keys)
        return {**config, **self.extra(file, keys, config)}


def _embedding_shape(file: GgufFile) -> tuple[int, ...]:
    if EMBEDDING not in file.tensors:
        raise CheckpointError(f"the file lacks {EMBEDDING}")
    shape = file.shape(EMBEDDING)
    if len(shape) != 2:
        raise CheckpointError(f"{EMBEDDING} has the shape {shape}, which is not a matrix")
    return shape


def common_config(file: GgufFile, keys: ModelKeys) -> Config:
    """Return what every family's configuration has."""
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    vocab_size, width = _embedding_shape(file)
    keys.only("vocab_size", vocab_size)
    keys.only("embedding_length", width)
    kv_heads = keys.count("attention.head_count_kv", heads)
    prefix = f"{file.architecture}.attention"
    if head_dim % 2 or head_dim > _MAX_HEAD:
        raise CheckpointError(
            f"{prefix}.key_length: {head_dim}; must be an even number up to {_MAX_HEAD:,}"
        )
    keys.only("attention.value_length", head_dim)
    if heads % kv_heads:
        raise CheckpointError(
            f"{prefix}.head_count_kv: {kv_heads}; must divide the {heads} heads of queries"
        )
    layers = keys.count("block_count")
    if layers > len(file.tensors):
        # A model with so many would be put together before it is compared with the file.
        raise CheckpointError(
            f"{file.architecture}.block_count: {layers}; the file has {len(file.tensors)} tensors"
        )
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(file, keys, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _llama(file: GgufFile, _keys: ModelKeys, _config: Config) -> Config:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _phi3(_file: GgufFile, keys: ModelKeys, config: Config) -> Config:
    # Longer contexts than the first have frequencies by tensors, which are refused.
    keys.only("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"sliding_window": keys.count("attention.sliding_window", 0, least=0) or None}


def _gemma2(_file: GgufFile, keys: ModelKeys, config: Config) -> Config:
    return {
        **_GELU,
        **_windows(keys, config, period=2),
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(_file: GgufFile, keys: ModelKeys, config: Config) -> Config:
    local = keys.number("rope.freq_base_swa", 10000.0)
    return {
        **_GELU,
        **_windows(keys, config, period=6),
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=62),
        # The file's keys are those of the layers that see everything.
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _windows(keys: ModelKeys, config: Config, period: int) -> Config:
    """Every `period`-th layer sees everything, as llama.cpp's code has it where no key says so."""
    keys.only("attention.sliding_window_pattern", period)
    kinds = [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return {"sliding_window": keys.count("attention.sliding_window"), "layer_types": kinds}


def _query_scale(config: Config, layers_of_27b: int) -> int:
    """Return the query scale, which no key holds; the 27B models use width over heads."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


FAMILIES: Mapping[str, Family] = {
    "llama": Family(model_type="llama", layer=_DENSE, extra=_llama, permuted=True),
    "qwen2": Family(model_type="qwen2", layer=_DENSE),
    "qwen3": Family(model_type="qwen3", layer={**_DENSE, **_HEAD_NORMS}),
    "phi3": Family(model_type="phi3", layer=_FUSED, extra=_phi3),
    "gemma": Family(
        model_type="gemma",
        layer=_DENSE,
        extra=lambda *_: _GELU,
        norms_plus_one=True,
        embeds_blocks=False,
    ),
    "gemma2": Family(
        model_type="gemma2",
        layer={**_ATTENTION, **_MLP, **_FOUR_NORMS},
        extra=_gemma2,
        norms_plus_one=True,
        embeds_blocks=False,
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        layer={**_ATTENTION, **_MLP, **_FOUR_NORMS, **_HEAD_NORMS},
        extra=_gemma3,
        norms_plus_one=True,
    ),
}
"""By `general.architecture`. Mistral's models are `llama` to llama.cpp."""


def family_of(file: GgufFile) -> Family:
    """Return the file's family. Raises `CheckpointError` for one that is not read."""
    try:
        return FAMILIES[file.architecture]
    except KeyError:
        raise CheckpointError(
            f"architecture {file.architecture!r} is not read from GGUF, "
            f"{', '.join(FAMILIES)} are; use the model's Hugging Face checkpoint"
        ) from None
