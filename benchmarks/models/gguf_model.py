"""Write a Llama checkpoint as GGUF: ``python -m benchmarks.models.gguf_model CHECKPOINT FILE``.

Runs in the peers' environment, which has `gguf` but neither torch nor transformers. Weights keep
their bfloat16 bits; norms become float32, as llama.cpp requires. Rows of the query and key
projections are permuted, because llama.cpp rotates neighbouring dimensions and transformers halves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMAL, _CONTROL = 1, 3  # token types


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of the tensor that transformers calls `name`; raises KeyError."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def interleave_heads(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder the rows [heads * size, n] of a projection: i and i + size/2 become neighbours."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values of bfloat16 `bits`."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_bfloat16(path: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Yield the name and bits of every tensor of a file; raises ValueError for another dtype."""
    data = np.memmap(path, np.uint8, mode="r")
    header_size = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + header_size].tobytes())
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if about["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {about['dtype']}, expected BF16")
        begin, end = (8 + header_size + offset for offset in about["data_offsets"])
        yield name, np.frombuffer(data[begin:end], np.uint16).reshape(about["shape"])


def tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield llama.cpp's tensors: float32 norms, and uint16 bits of bfloat16 for the rest."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, bits in read_bfloat16(file):
            projection = name.split(".")[-2]
            if bits.ndim == 1:
                yield gguf_name(name), widen(bits)
            elif projection in heads:
                yield gguf_name(name), interleave_heads(bits, heads[projection])
            else:
                yield gguf_name(name), bits


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Write `checkpoint`, which has a byte-level BPE tokenizer, as `target`."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, checkpoint, config)
    for name, tensor in tensors(checkpoint, config):
        if tensor.dtype == np.uint16:
            bits = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    described = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = described["model"]["vocab"]
    special = {token["content"] for token in described["added_tokens"]}
    names = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([_CONTROL if name in special else _NORMAL for name in names])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def main() -> None:
    """Convert the checkpoint of the first argument into the file of the second."""
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
