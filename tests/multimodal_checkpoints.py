"""Tiny multimodal checkpoints, written by transformers' own multimodal classes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoint_families import FAMILIES, SIZES, Family
from tests.checkpoint_tokenizer import tokenizer_files, train_tokenizer
from tests.checkpoint_weights import randomise

_TEXT = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
_HEADS = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_VL_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
_VL_TOWER |= {"out_hidden_size": SIZES["hidden_size"]}
_VL_TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7}
# Half the pairs of a head of 32: as Qwen2-VL's proportions, 16, 24 and 24 of 64.
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}

# Of Ministral-3, with a first context that the tests' prompts leave.
_MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0}
_MINISTRAL_ROPE |= {"original_max_position_embeddings": 64, "max_position_embeddings": 1024}
_MINISTRAL_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1}
_MINISTRAL_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0}


def _config(
    text: Mapping[str, Any], vision: Mapping[str, Any], *, tied: bool = False, **fields: Any
) -> dict[str, Any]:
    parts = {"text_config": {**_TEXT, **text}, "vision_config": {**vision}}
    return {**parts, **fields, "tie_word_embeddings": tied}


_SEES = {**_TOWER, **_HEADS}
_SIGLIP = {"model_type": "siglip_vision_model", **_SEES}
_PIXTRAL = {"model_type": "pixtral", **_SEES, "head_dim": 16}
_CLIP = {"model_type": "clip_vision_model", **_SEES}
_MISTRAL = {"model_type": "mistral", "sliding_window": None}
_MINISTRAL = {"model_type": "ministral3", "rope_parameters": _MINISTRAL_ROPE}
_QWEN2_TOWER = {"depth": 1, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2}
_QWEN2_TOWER |= {"hidden_size": SIZES["hidden_size"]}
_QWEN3_ROPE = {**_MROPE, "mrope_interleaved": True}
_QWEN2 = {"rope_parameters": _MROPE}
_GEMMA3, _GEMMA4 = (FAMILIES[f"gemma{n}_text"].fields for n in (3, 4))
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gemma3": _config(_GEMMA3, _SIGLIP, tied=True, mm_tokens_per_image=4, image_token_index=5),
    "gemma4": _config(_GEMMA4, _SEES, tied=True),
    "llama4": _config(FAMILIES["llama4"].fields, {**_SEES, "vision_output_dim": 32}),
    "mistral3": _config(_MISTRAL, _PIXTRAL, image_token_index=5),
    "ministral3": _config(_MISTRAL | _MINISTRAL, _PIXTRAL, image_token_index=5),
    "llava": _config({"model_type": "llama"}, _CLIP, image_token_index=5),
    "llava_next": _config(_MISTRAL, _CLIP, image_grid_pinpoints=[[28, 28]], image_token_index=5),
    "qwen2_vl": _config(_QWEN2, _QWEN2_TOWER, tied=True, **_VL_TOKENS),
    "qwen2_5_vl": _config(_QWEN2, {**_VL_TOWER, "fullatt_block_indexes": [0]}, **_VL_TOKENS),
    "qwen3_vl": _config(
        {"rope_parameters": _QWEN3_ROPE},
        {**_VL_TOWER, "deepstack_visual_indexes": [0]},
        **_VL_TOKENS,
    ),
}
_FAMILY_OF = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "llama4": "llama4"}
_FAMILY_OF |= {"qwen3_vl": "qwen3"}
_TYPES = {"ministral3": "mistral3"}


def make_multimodal_checkpoint(model_type: str, path: Path, **fields: Any) -> Path:
    """Write the member called `model_type`, `fields` replaced, into `path`, which is returned."""
    config_class = transformers.CONFIG_MAPPING[_TYPES.get(model_type, model_type)]
    config = config_class(**{**CONFIGS[model_type], **fields})
    model = transformers.AutoModelForImageTextToText.from_config(config)
    family: Family = FAMILIES[_FAMILY_OF.get(model_type, "llama")]
    # What the weights are scaled by is the text's.
    for name in ("hidden_size", "num_hidden_layers"):
        setattr(model.config, name, getattr(config.get_text_config(), name))
    randomise(model, family, seed=0)
    for name in ("hidden_size", "num_hidden_layers"):
        delattr(model.config, name)
    model.save_pretrained(path)
    for name, content in tokenizer_files(
        train_tokenizer(), SIZES["max_position_embeddings"]
    ).items():
        (path / name).write_bytes(content)
    return path


def enclose_gemma3n(text: Path, path: Path) -> Path:
    """Write the text checkpoint `text` into `path` as Gemma-3n is published.

    transformers' own class needs a package for images to make its vision tower.
    """
    shutil.copytree(text, path)
    (file,) = path.glob("*.safetensors")
    tower = {f"model.{part}.weight": torch.zeros(2, 2) for part in ("vision_tower", "embed_audio")}
    weights = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in load_file(file).items()
    }
    save_file({**weights, **tower}, file, {"format": "pt"})
    config = json.loads((text / "config.json").read_text())
    whole = transformers.Gemma3nConfig(text_config=config)
    whole.architectures = ["Gemma3nForConditionalGeneration"]
    whole.save_pretrained(path)
    return path


def name_as_in_memory(path: Path) -> None:
    """Rename the weights as transformers has them in memory, and as some tools save them."""
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    save_file({_new(name): weight for name, weight in weights.items()}, file, {"format": "pt"})


def _new(name: str) -> str:
    if name.startswith("language_model."):
        inner = name.removeprefix("language_model.")
        return inner.replace("model.", "model.language_model.", 1)
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"
