"""vLLM's text models over the weights of multimodal checkpoints.

A checkpoint has its language model under a prefix, which changed with transformers 4.52, beside a
vision tower and what connects them; those are passed over. Positions in three dimensions (M-RoPE)
are equal in all of them where there is text alone, which is plain rotation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.gemma3n import Gemma3nForCausalLM
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
from vllm.model_executor.models.llama4 import Llama4ForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from rbln_backend.limits import MULTIMODAL

_PARTS = tuple(
    "visual. vision_tower. vision_model. multi_modal_projector. image_newline audio_tower. "
    "embed_vision. embed_audio.".split()
)
_NAMES = WeightsMapper(
    orig_to_new_prefix={
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        **{f"{before}{part}": None for part in _PARTS for before in ("", "model.")},
    }
)
_MULTIMODAL_ROPE = ("type", "mrope_section", "mrope_interleaved")


class _TextOf:
    """Put before a text model's class: it takes the configuration and weights that enclose it."""

    text_types: ClassVar[tuple[str, ...]]
    """Values of `text_config.model_type` that the class computes; others are refused."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        found = vllm_config.model_config.hf_config.get_text_config().model_type
        if found not in self.text_types:
            raise MULTIMODAL.refusal(f"text_config.model_type {found!r}")
        super().__init__(vllm_config=_text_config(vllm_config), prefix=prefix)  # type: ignore[call-arg]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the language model's part of ``weights``; return the names that it has here."""
        loaded: set[str] = super().load_weights(_NAMES.apply(weights))  # type: ignore[misc]
        return loaded


class Gemma3Text(_TextOf, Gemma3ForCausalLM):
    """Of Gemma-3 with SigLIP: 4b, 12b and 27b."""

    text_types = ("gemma3_text",)
    # Adapters and lists of quantised layers name layers as the checkpoint does.
    hf_to_vllm_mapper = Gemma3ForCausalLM.hf_to_vllm_mapper | _NAMES


class Gemma3nText(_TextOf, Gemma3nForCausalLM):
    """Of Gemma-3n: E2B and E4B."""

    text_types = ("gemma3n_text",)
    hf_to_vllm_mapper = Gemma3nForCausalLM.hf_to_vllm_mapper | _NAMES


class Gemma4Text(_TextOf, Gemma4ForCausalLM):
    """Of Gemma-4, with and without experts."""

    text_types = ("gemma4_text",)
    hf_to_vllm_mapper = Gemma4ForCausalLM.hf_to_vllm_mapper | _NAMES


class Llama4Text(_TextOf, Llama4ForCausalLM):
    """Of Llama-4: Scout and Maverick."""

    text_types = ("llama4_text",)
    hf_to_vllm_mapper = _NAMES


class MistralText(_TextOf, MistralForCausalLM):
    """Of Mistral-Small-3.1 and 3.2, Ministral-3, and Llava's, of which some are Llamas.

    Mistral's class is Llama's with queries that may be scaled by their position.
    """

    text_types = ("mistral", "ministral3", "llama")
    hf_to_vllm_mapper = MistralForCausalLM.hf_to_vllm_mapper | _NAMES


class Qwen2VLText(_TextOf, Qwen2ForCausalLM):
    """Of Qwen2-VL and Qwen2.5-VL."""

    text_types = ("qwen2_vl_text", "qwen2_5_vl_text")
    hf_to_vllm_mapper = Qwen2ForCausalLM.hf_to_vllm_mapper | _NAMES


class Qwen3VLText(_TextOf, Qwen3ForCausalLM):
    """Of Qwen3-VL without experts."""

    text_types = ("qwen3_vl_text",)
    hf_to_vllm_mapper = Qwen3ForCausalLM.hf_to_vllm_mapper | _NAMES


def _text_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy whose model is the text model alone."""
    model = copy.copy(vllm_config.model_config)
    whole = model.hf_config
    text = copy.deepcopy(whole.get_text_config())
    # The class that sees both ends of the model decides; vLLM corrects it by the weights' names.
    text.tie_word_embeddings = whole.tie_word_embeddings
    rope = text.rope_parameters
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        # vLLM 0.30 looks for it where Mistral's own format has it.
        first = rope["original_max_position_embeddings"]
        text.llama_4_scaling = {"original_max_position_embeddings": first, "beta": beta}
    text.rope_parameters = _plain(rope)
    model.hf_config = text
    config = copy.copy(vllm_config)
    config.model_config = model
    return config


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key not in _MULTIMODAL_ROPE}
