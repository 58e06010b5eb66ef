"""Architectures whose classes are our own: text models of multimodal ones, and MTP layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_CLASSES = "rbln_backend.models.text_models"
_MTP_CLASSES = "rbln_backend.models.mtp_layers"

TEXT_MODELS: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3Text",
    "Gemma3nForConditionalGeneration": "Gemma3nText",
    "Gemma4ForConditionalGeneration": "Gemma4Text",
    "Llama4ForConditionalGeneration": "Llama4Text",
    "LlavaForConditionalGeneration": "MistralText",
    "LlavaNextForConditionalGeneration": "MistralText",
    "Mistral3ForConditionalGeneration": "MistralText",
    "Qwen2VLForConditionalGeneration": "Qwen2VLText",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2VLText",
    "Qwen3VLForConditionalGeneration": "Qwen3VLText",
}
"""Names of `config.json` and of the classes in `text_models.py`."""

_MTP_LAYERS: Mapping[str, str] = {
    "ErnieMTPModel": "ScaledErnieMTP",
    "Glm4MoeMTPModel": "ScaledGlm4MoeMTP",
    "MiMoMTPModel": "ScaledMiMoMTP",
}
"""vLLM's names of MTP layers and those of the classes in `mtp_layers.py`."""


def register() -> None:
    """Let vLLM make these models for those names, in this process; idempotent.

    vLLM's own classes of multimodal models cannot be imported where packages for images are not
    installed.
    """
    # Platforms are chosen before models can be imported.
    from vllm import ModelRegistry

    for architecture, name in TEXT_MODELS.items():
        ModelRegistry.register_model(architecture, f"{_CLASSES}:{name}")
    for architecture, name in _MTP_LAYERS.items():
        ModelRegistry.register_model(architecture, f"{_MTP_CLASSES}:{name}")


def missing_token_ids(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the ids below ``vocab_size`` without a token, ascending.

    Embeddings are padded, and some tokenizers have gaps. Empty without a tokenizer.
    """
    if tokenizer is None:
        return []
    known = set(tokenizer.get_vocab().values())
    missing = [token for token in range(vocab_size) if token not in known]
    fast: Any = getattr(tokenizer, "_tokenizer", None)
    if hasattr(fast, "id_to_token"):
        return [token for token in missing if fast.id_to_token(token) is None]
    # In other tokenizers several ids may have one name, such as bytes that are no text.
    last = max(*known, len(tokenizer) - 1)
    return [token for token in missing if token > last]


def missing_in(config: ModelConfig) -> list[int]:
    """Return the ids of a model without a token, by its own tokenizer; see above."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return missing_token_ids(cached_tokenizer_from_config(config), config.get_vocab_size())
