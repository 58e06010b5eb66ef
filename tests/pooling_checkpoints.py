"""Tiny checkpoints of models that pool, made from those that generate."""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from tests.checkpoint_tokenizer import VOCAB_SIZE

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja")
_ST = "sentence_transformers.models"


def bare_model(source: Path, target: Path) -> Path:
    """The decoder without its head, under its own architecture's name (`LlamaModel`)."""
    AutoModel.from_pretrained(source, dtype=torch.float32).save_pretrained(target)
    return _with_tokenizer(source, target)


def classifier(source: Path, target: Path, *, num_labels: int) -> Path:
    """The decoder with a classification head over its last token."""
    model = AutoModelForSequenceClassification.from_pretrained(
        source, dtype=torch.float32, num_labels=num_labels
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=generator) * 0.2)
    model.save_pretrained(target)
    return _with_tokenizer(source, target)


_ENCODER_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256}
_ENCODER_SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4}
_ENCODER_SIZES |= {"max_position_embeddings": 300}
_ENCODER_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
_ENCODER_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "Bert": {},
    # Fields that configurations on the hub have and vLLM reads.
    "XLMRoberta": {"type_vocab_size": 1, "position_embedding_type": "absolute"},
    # Every third layer sees all of a prompt, the others 16 tokens to either side.
    "ModernBert": {"local_attention": 32, "global_attn_every_n_layers": 3},
}


def encoder(family: str, source: Path, target: Path, *, num_labels: int = 0) -> Path:
    """An encoder of `family` ("Bert", "XLMRoberta", "ModernBert") with the tokenizer of `source`.

    ``num_labels``: with a classification head.
    """
    fields = {**_ENCODER_SIZES, **_ENCODER_FIELDS[family]}
    if num_labels:
        fields["num_labels"] = num_labels
    config = getattr(transformers, f"{family}Config")(**fields)
    head = "ForSequenceClassification" if num_labels else "Model"
    model = getattr(transformers, f"{family}{head}")(config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.15 if parameter.ndim > 1 else 0.2
            mean = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + mean)
    model.save_pretrained(target)
    return _with_tokenizer(source, target)


def sentence_transformer(
    source: Path,
    target: Path,
    *,
    pooling: str = "lasttoken",
    dense: torch.Tensor | None = None,
    **config: Any,
) -> Path:
    """A copy with the module files of sentence-transformers, and fields of ``config`` set.

    ``pooling`` is one of that library's modes; ``dense`` [out, in] a projection after it.
    """
    shutil.copytree(source, target)
    _write_json(target / "config.json", json.loads((target / "config.json").read_text()) | config)
    modules = ["Transformer", "Pooling", *(["Dense"] if dense is not None else []), "Normalize"]
    entries = []
    for index, name in enumerate(modules):
        path = "" if index == 0 else f"{index}_{name}"
        (target / path).mkdir(exist_ok=True)
        entries.append({"idx": index, "name": str(index), "path": path, "type": f"{_ST}.{name}"})
    _write_json(target / "modules.json", entries)
    _write_json(target / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    if dense is not None:
        out_features, in_features = dense.shape
        folder = target / "2_Dense"
        sizes = {"in_features": in_features, "out_features": out_features, "bias": False}
        identity = "torch.nn.modules.linear.Identity"
        _write_json(folder / "config.json", {**sizes, "activation_function": identity})
        save_file({"linear.weight": dense}, folder / "model.safetensors")
    return target


def _with_tokenizer(source: Path, target: Path) -> Path:
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, target / file.name)
    return target


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


# -------------------------------------------------------------------------------- pooling reference
@lru_cache(maxsize=2)
def _load(path: Path, kind: type) -> PreTrainedModel:
    model: PreTrainedModel = kind.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def hidden_states(path: Path, token_ids: Sequence[int], *, sees_all: bool = False) -> Tensor:
    """[T, H]: the last layer's output after the final norm.

    ``sees_all`` makes a decoder attend in both directions.
    """
    ids = torch.tensor([list(token_ids)])
    mask = torch.zeros(1, 1, len(token_ids), len(token_ids)) if sees_all else None
    with torch.inference_mode():
        result: Tensor = _load(path, AutoModel)(ids, attention_mask=mask).last_hidden_state
    return result[0]


def class_logits(
    path: Path, token_ids: Sequence[int], *, document_start: int | None = None
) -> Tensor:
    """[labels], before any activation; tokens from ``document_start`` on are of type 1."""
    ids = torch.tensor([list(token_ids)])
    types: dict[str, Tensor] = {}
    if document_start is not None:
        types["token_type_ids"] = (torch.arange(len(token_ids)) >= document_start).long()[None]
    with torch.inference_mode():
        result: Tensor = _load(path, AutoModelForSequenceClassification)(ids, **types).logits
    return result[0]


def pooled(path: Path, token_ids: Sequence[int], pooling: str) -> Tensor:
    """[H]: one of LAST, CLS and MEAN over the hidden states, scaled to length 1."""
    rows = hidden_states(path, token_ids)
    vector = {"LAST": rows[-1], "CLS": rows[0], "MEAN": rows.mean(0)}[pooling]
    return torch.nn.functional.normalize(vector, dim=-1)
