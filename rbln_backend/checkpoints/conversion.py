"""Writes a GGUF file as a safetensors checkpoint, by transformers and the package gguf.

Both leave out what they do not know without a word, and the model would answer wrongly. Keys,
tensors and tokenizers that they do not read are refused here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from rbln_backend.errors import CheckpointError

# Keys that transformers does not read, and the fields of its configuration with their meaning.
_SAME = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.scaling.original_context_length": "max_position_embeddings",
}
# Values of `tokenizer.ggml.pre` for which transformers' tokenizer differs from the published ones.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
_ENDS = ("eos", "eot", "eom")
# By `general.file_type`; weights of all other types are written as bfloat16.
_DTYPES = {0: torch.float32, 1: torch.float16}


def write_checkpoint(file: Path, folder: Path) -> None:
    """Write `file` into the empty `folder`; transformers shows its progress on standard error.

    Holds all weights in memory. Raises `CheckpointError` for a file that is damaged or not
    supported.
    """
    try:
        _write(file, folder)
    except CheckpointError as error:
        raise CheckpointError(f"{file.name}: {error}") from error
    except Exception as error:
        # Damaged files raise what numpy, struct and json do.
        kind = type(error).__name__
        raise CheckpointError(
            f"{file.name} is damaged, or transformers does not support it: {kind}: {error}"
        ) from error


def _write(file: Path, folder: Path) -> None:
    keys: dict[str, Any]
    keys, names = read_gguf_metadata(str(file))
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**place)
    _refuse_unread(keys, config)
    tokenizer = _tokenizer(keys, place)
    ends = {keys[key] for end in _ENDS if (key := f"tokenizer.ggml.{end}_token_id") in keys}
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config.update({**special, "eos_token_id": sorted(ends) or None})
    dtype = _DTYPES.get(keys.get("general.file_type", -1), torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    make_processor: Any = TENSOR_PROCESSORS.get(keys["general.architecture"], TensorProcessor)
    processor = make_processor(config=config.to_dict())
    if unread := set(names) - set(get_gguf_hf_weights_map(model, processor)):
        raise CheckpointError(f"transformers does not read its tensors {', '.join(sorted(unread))}")
    read = load_gguf_checkpoint(
        str(file), return_tensors=True, model_to_load=model, torch_dtype=dtype
    )
    model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    if missing := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise CheckpointError(f"it lacks the weights {', '.join(missing)}")
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _refuse_unread(keys: dict[str, Any], config: Any) -> None:
    architecture = keys["general.architecture"]
    read: Any = GGUF_CONFIG_MAPPING[architecture]
    if keys.get("split.count", 1) > 1:
        raise CheckpointError("it is one part of a model; llama-gguf-split --merge joins them")
    for key, value in keys.items():
        _, is_models, name = key.partition(f"{architecture}.")
        if not is_models or read.get(name) is not None:
            continue
        expected = getattr(config, _SAME.get(name, ""), None)
        if value != expected:
            raise CheckpointError(
                f"transformers does not read its {key}, {value!r}; use the model's Hugging Face "
                "checkpoint"
            )


def _tokenizer(keys: dict[str, Any], place: dict[str, str]) -> Any:
    """Return the tokenizer, which cuts text as the published one does."""
    kind, pre = keys.get("tokenizer.ggml.model"), keys.get("tokenizer.ggml.pre")
    known = ("gpt-2", *_SINGLE_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS)
    if kind == "gpt2" and pre not in known:
        raise CheckpointError(
            f"transformers does not cut text as its tokenizer.ggml.pre, {pre!r}; use the model's "
            "Hugging Face checkpoint"
        )
    tokenizer = AutoTokenizer.from_pretrained(**place)
    backend = tokenizer.backend_tokenizer
    if pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if pre in _WHOLE_WORDS_FIRST:
        backend.model.ignore_merges = True
    return tokenizer
