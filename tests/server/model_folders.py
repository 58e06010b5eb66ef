"""Folders that hold a model's configuration and tokenizer and not one of its weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_SMALL = {
    name: LLAMA[name]
    for name in LLAMA
    if name not in ("architectures", "model_type", "head_dim", "num_key_value_heads")
}
_ENCODER_DECODER = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 512,
    "is_encoder_decoder": True,
}


def window_model(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """A model whose layers all look back 64 tokens."""
    named = {"architectures": [architecture], "model_type": model_type}
    return {**LLAMA, **named, "sliding_window": 64, **fields}


CANNOT_RUN: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown architecture": (
        {**LLAMA, "architectures": ["LlammaForCausalLM"]},
        ("'LlammaForCausalLM'", "unknown to vLLM", "did you mean 'LlamaForCausalLM'?"),
    ),
    "unknown model type": (
        {**LLAMA, "model_type": "lllama", "architectures": ["XForCausalLM"]},
        ("model_type 'lllama'", "unknown to transformers"),
    ),
    "own code": (
        {**LLAMA, "model_type": "x", "auto_map": {"AutoConfig": "configuration_x.XConfig"}},
        ("--trust-remote-code",),
    ),
    "multimodal": (
        {
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "model_type": "llava_onevision",
            "image_token_index": 5,
            "text_config": dict(LLAMA),
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 16,
                "projection_dim": 64,
            },
        },
        ("multimodal inputs", "text-only"),
    ),
    "encoder-decoder": (
        {
            "architectures": ["BartForConditionalGeneration"],
            "model_type": "bart",
            **_ENCODER_DECODER,
        },
        ("encoder-decoder models", "decoder-only"),
    ),
    "speech": (
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            **_ENCODER_DECODER,
        },
        ("encoder-decoder models",),
    ),
    "state space": (
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": 512,
            "state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
        },
        ("state-space", "all attention"),
    ),
    "unequal heads": (
        {
            **LLAMA,
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "head_dim": 32,
            "v_head_dim": 16,
        },
        ("values of another head size than keys", "one head size"),
    ),
    "dual chunk attention": (
        {
            **LLAMA,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "dual_chunk_attention_config": {"chunk_size": 256, "local_size": 64},
        },
        ("dual chunk attention", "dual_chunk_attention_config"),
    ),
    "prefix LM": (
        {**_SMALL, "architectures": ["HrmTextForCausalLM"], "model_type": "hrm_text"},
        ("prefix LM", "self_attn", "causal model"),
    ),
    "quantised experts": (
        {
            **LLAMA,
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            # Not whole blocks of 32.
            "intermediate_size": 80,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        ("quantised experts", "W4A16 MXFP4 group 32 experts", "sizes 128 and 80", "bfloat16 copy"),
    ),
    "quantised weights": (
        {**LLAMA, "quantization_config": {"quant_method": "mxfp4"}},
        ("quantization 'mxfp4'", "bfloat16 copy"),
    ),
    "weights of NVFP4": (
        {**LLAMA, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        ("quant_algo is 'NVFP4'", "bfloat16 copy"),
    ),
    "weights quantised in odd blocks": (
        LLAMA
        | {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 32],
            }
        },
        ("weight_block_size is [128, 32]", "bfloat16 copy"),
    ),
    "impossible sizes": ({**LLAMA, "num_attention_heads": 3}, ("config.json: ", "not a multiple")),
}
"""By feature: a config.json that needs it, and words that its refusal must hold."""


def write_folder(folder: Path, config: Mapping[str, Any], tokenizer_from: Path) -> Path:
    """Write `config` and the tokenizer files of a checkpoint into a new folder; returns it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in tokenizer_from.glob("*token*"):
        shutil.copy(file, folder)
    return folder
