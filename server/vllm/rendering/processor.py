"""Record in vLLM that a text model has no processor, whose chat template it would prefer.

To find that out, vLLM imports transformers' models and loads the tokenizer again: a second of each
start.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Files whose fields may name a processor, and the fields.
_CONFIGS = ("config.json", "tokenizer_config.json")
_FIELDS = ("processor_class", "AutoProcessor")


def skip_processor(model_config: ModelConfig, tokenizer: Any) -> None:
    """Fill vLLM's table of processors' templates for a checkpoint that cannot have one.

    `tokenizer` is the model's, or None if vLLM renders prompts without a template.
    """
    if tokenizer is None or model_config.is_multimodal_model:
        return
    name = str(tokenizer.name_or_path)
    if not has_no_processor(Path(name)):
        return
    from vllm.renderers import hf

    key = (
        name,
        model_config.revision,
        model_config.code_revision,
        bool(model_config.trust_remote_code),
    )
    hf._PROCESSOR_CHAT_TEMPLATES.setdefault(key, None)


def has_no_processor(folder: Path) -> bool:
    """Return True for a local checkpoint without files or fields of a processor."""
    if not folder.is_dir() or next(folder.glob("*processor*"), None) is not None:
        return False
    texts = [
        (folder / name).read_text(encoding="utf-8", errors="replace")
        for name in _CONFIGS
        if (folder / name).is_file()
    ]
    return not any(field in text for field in _FIELDS for text in texts)
