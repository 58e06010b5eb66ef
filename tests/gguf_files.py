"""Writes GGUF files of Llama checkpoints, with llama.cpp's own package for names and layout."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

F32 = gguf.GGMLQuantizationType.F32
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    without: str = "-",
) -> Path:
    """Write `checkpoint` as `path`, its matrices as `kind`, and return `path`.

    `keys` are added or replace keys (None removes one), `extra` tensors are added. Tensors whose
    name has `without` in it are left out.
    """
    config, tensors = _loaded(checkpoint)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if kind == F32 else 7)
    for key, value in (_keys(config) | _tokenizer_keys(checkpoint) | dict(keys or {})).items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, values in tensors.items():
        for part, count in heads.items():
            if part in name:
                # As llama.cpp's converter interleaves rows of queries and keys.
                halves = values.reshape(count, 2, -1, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        tensor = names.get_name(name, (".weight", ".bias"))
        if without in tensor:
            continue
        if values.ndim == 1 or kind == F32:
            writer.add_tensor(tensor, np.ascontiguousarray(values))
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for tensor, values in (extra or {}).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _loaded(checkpoint: Path) -> tuple[Any, dict[str, NDArray[np.float32]]]:
    """Return the configuration and the parameters of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    return model.config, {name: x.detach().numpy() for name, x in model.named_parameters()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    if value is not None:
        add[type(value)](key, value)


def _keys(config: Any) -> dict[str, Any]:
    head_dim = config.hidden_size // config.num_attention_heads
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


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
