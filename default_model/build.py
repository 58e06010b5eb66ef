"""Writes the default model: `python -m default_model.build --out DIR`.

Invariants, both held by tests/unit/default_model: two runs write the same bytes, and a reader never
sees half a checkpoint, because config.json, which makes a folder loadable, is put in place last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import safetensors.torch
from tokenizers import Tokenizer

from default_model.tokenizer import (
    BOS_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    tokenizer_files,
    train_tokenizer,
)
from default_model.weights import LlamaShape, llama_weights

SHAPE = LlamaShape(vocab_size=VOCAB_SIZE)
SEED = 20261121


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _config(shape: LlamaShape, token_ids: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        **token_ids,
    }


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    names = {"bos_token_id": BOS_TOKEN, "eos_token_id": EOS_TOKEN, "pad_token_id": PAD_TOKEN}
    vocabulary = tokenizer.get_vocab()
    return {name: vocabulary[token] for name, token in names.items()}


def checkpoint_files() -> dict[str, bytes]:
    """Return every file of the checkpoint; config.json is the last one."""
    tokenizer = train_tokenizer()
    ids = _token_ids(tokenizer)
    return {
        **tokenizer_files(tokenizer, SHAPE.max_position_embeddings),
        "model.safetensors": safetensors.torch.save(
            llama_weights(SHAPE, SEED), metadata={"format": "pt"}
        ),
        "generation_config.json": _json(ids),
        "README.md": (Path(__file__).parent / "model_card.md").read_bytes(),
        "config.json": _json(_config(SHAPE, ids)),
    }


def _replace(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".build-", delete=False) as file:
        file.write(content)
    made = Path(file.name)
    made.chmod(0o644)
    made.replace(path)


def write_checkpoint(out: Path) -> int:
    """Write the checkpoint into `out`, made if missing, and return its size in bytes."""
    files = checkpoint_files()
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)
    for name, content in files.items():
        _replace(out / name, content)
    return sum(map(len, files.values()))


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m default_model.build", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    out: Path = parser.parse_args().out
    size = write_checkpoint(out)
    sys.stdout.write(f"default model: {size / 1e6:.1f} MB in {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
