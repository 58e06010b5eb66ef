"""Writes GGUF files of checkpoints, with llama.cpp's own package for names, blocks and layout.

What llama.cpp's converter does to weights is done here as its documents say: rows of Llama's
queries and keys are interleaved, Gemma's norms have one added.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

Array = NDArray[Any]
Keys = Mapping[str, Any]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
_KINDS = gguf.GGMLQuantizationType
F32 = _KINDS.F32
K_TYPES = (_KINDS.Q4_K, _KINDS.Q5_K, _KINDS.Q6_K)
_TWO_SCALES = (_KINDS.Q4_1, _KINDS.Q5_1, _KINDS.Q4_K, _KINDS.Q5_K)
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    others: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    keys: Keys | None = None,
    extra: Mapping[str, Array] | None = None,
    part_tensors: int = 0,
) -> Path:
    """Write `checkpoint` as `path`, its matrices as `kind`, and return `path`.

    `others` are kinds by what a tensor's name has in it; of the K types, which that package only
    reads, blocks are random.
    `keys` are added or replace keys (None removes one), `extra` tensors are added. With
    `part_tensors`, the most that a part has, returns the first part instead.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    found = _model_keys(config) | _tokenizer_keys(checkpoint) | dict(keys or {})
    writer = gguf.GGUFWriter(path, name, split_max_tensors=part_tensors)
    for key, value in found.items():
        _add(writer, key.replace("ARCH", name), value)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for hf_name, weight in model.named_parameters():
        values = _as_llama_cpp(hf_name, weight.detach().numpy(), config)
        tensor = names.get_name(hf_name, (".weight", ".bias"))
        own = next((other for part, other in (others or {}).items() if part in tensor), kind)
        _add_tensor(writer, tensor, values, own)
    for tensor, values in (extra or {}).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"), default=path)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        add[type(value)](key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: Array, kind: gguf.GGMLQuantizationType
) -> None:
    if values.ndim == 1 or kind == F32:
        writer.add_tensor(name, np.ascontiguousarray(values))
    elif kind in K_TYPES:
        writer.add_tensor(name, random_blocks(kind, *values.shape, scale=1e-4), raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def random_blocks(
    kind: gguf.GGMLQuantizationType, rows: int, columns: int, *, scale: float
) -> Array:
    """Random bytes are blocks of any kind, but for the scales, which could be no numbers."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    packed = rng.integers(0, 256, (rows, columns // elements, num_bytes), np.uint8)
    half = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    starts = (0, 2) if kind in _TWO_SCALES else (208,) if kind == _KINDS.Q6_K else (0,)
    for start in starts:
        packed[..., start : start + 2] = half
    return packed.reshape(rows, -1)


def _as_llama_cpp(name: str, values: Array, config: Any) -> Array:
    if config.model_type in ("llama", "mistral"):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:
                halves = values.reshape(count, 2, -1, *values.shape[1:])
                return halves.swapaxes(1, 2).reshape(values.shape)
    if config.model_type.startswith("gemma") and "norm" in name:
        return values + np.float32(1.0)
    return values


def _model_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    keys = {
        "ARCH.block_count": config.num_hidden_layers,
        "ARCH.context_length": config.max_position_embeddings,
        "ARCH.embedding_length": config.hidden_size,
        "ARCH.feed_forward_length": config.intermediate_size,
        "ARCH.attention.head_count": config.num_attention_heads,
        "ARCH.attention.head_count_kv": config.num_key_value_heads,
        "ARCH.attention.key_length": head_dim,
        "ARCH.attention.value_length": head_dim,
        "ARCH.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "ARCH.rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {
            "ARCH.rope.scaling.type": rope["rope_type"],
            "ARCH.rope.scaling.factor": float(rope["factor"]),
        }
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        keys["ARCH.rope.scaling.original_context_length"] = original
    if config.model_type == "phi3":
        keys["ARCH.rope.scaling.original_context_length"] = config.max_position_embeddings
    if config.model_type in ("gemma2", "gemma3_text", "phi3"):
        keys["ARCH.attention.sliding_window"] = config.sliding_window or 0
    if config.model_type == "gemma2":
        keys["ARCH.attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        keys["ARCH.final_logit_softcapping"] = float(config.final_logit_softcapping)
    return keys


def _tokenizer_keys(checkpoint: Path) -> dict[str, Any]:
    """The keys of the byte-level tokenizer that the test checkpoints have."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    content = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    added = {entry["id"]: entry["special"] for entry in content["added_tokens"]}
    kinds = [
        NORMAL if index not in added else CONTROL if added[index] else USER_DEFINED
        for _, index in vocab
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": (checkpoint / "chat_template.jinja").read_text("utf-8"),
    }
