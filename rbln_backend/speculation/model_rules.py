"""Rejection of draft models in engines that have not been shown to give the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rbln_backend.buckets import DRAFT_LAYERS, EAGLE, EAGLE3, MTP
from rbln_backend.config import RblnConfig
from rbln_backend.limits import DRAFT_MODEL, DRAFT_MODEL_OPTION, EAGLE_MODEL, MTP_MODEL, Feature
from rbln_backend.speculation.text_drafts import get_draft_model

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

_PLAIN_OPTIONS = {
    "draft_sample_method": "greedy",
    "rejection_sample_method": "standard",
    "moe_backend": None,
    "attention_backend": None,
    "kv_cache_dtype": None,
    "max_model_len": None,
    "draft_load_config": None,
    "num_speculative_tokens_per_batch_size": None,
    "parallel_drafting": False,
    "use_heterogeneous_vocab": False,
    "use_local_argmax_reduction": False,
    "disable_padded_drafter_batch": False,
    "enable_adaptive_verification": False,
}
"""The value of each option of vLLM's draft models that changes nothing here."""


_EAGLE_MODELS = {
    EAGLE: (("LlamaForCausalLM",), ("EagleLlamaForCausalLM",)),
    EAGLE3: (
        (
            "GptOssForCausalLM",
            "LlamaForCausalLM",
            "MiniMaxM2ForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
        ),
        (
            "Eagle3LlamaForCausalLM",
            "Eagle3MiniMaxM2ForCausalLM",
            "Eagle3Qwen3ForCausalLM",
            "LlamaForCausalLMEagle3",
        ),
    ),
}
"""vLLM's architectures of served models and of their draft models, by method."""

MTP_FAMILIES = {
    "DeepseekV3ForCausalLM": "DeepSeekMTPModel",
    "Ernie4_5_MoeForCausalLM": "ErnieMTPModel",
    "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
    "MiMoForCausalLM": "MiMoMTPModel",
}
"""vLLM's architecture of the MTP layers of each served one."""

_BLOCKS = "fp8 in blocks"
_QUANTIZED_MTP = (_BLOCKS, "fp8", "compressed-tensors float-quantized")
"""Formats of checkpoints whose MTP layers may be quantised."""


def check_draft_model(config: VllmConfig, rbln: RblnConfig, *, on_npu: bool) -> None:
    """Raise for the first setting of the engine that does not go with its draft model."""
    speculation, model = config.speculative_config, config.model_config
    assert speculation is not None
    method = f"method {speculation.method!r}"
    # Where it is not given, vLLM sets it to the served model's.
    own, ranks = (
        speculation.draft_tensor_parallel_size,
        config.parallel_config.tensor_parallel_size,
    )
    if own != ranks:
        raise DRAFT_MODEL_OPTION.refusal(
            f"draft_tensor_parallel_size {own} with tensor_parallel_size {ranks}"
        )
    settings = {
        "enable_lora true": config.lora_config is not None,
        "KV tiers": rbln.has_kv_tiers,
        f"architecture {model.architecture}": model.use_mla and speculation.method != MTP,
    }
    DRAFT_MODEL.refuse(settings, method)
    if speculation.method in _EAGLE_MODELS:
        _check_eagle(config)
    if speculation.method == MTP:
        _check_mtp(config, on_npu=on_npu)
    expected = model.quantization if speculation.method == MTP else None
    for name, plain in (_PLAIN_OPTIONS | {"quantization": expected}).items():
        value = getattr(speculation, name)
        if value != plain:
            raise DRAFT_MODEL_OPTION.refusal(f"--speculative-config {name} {value!r}")
    quantization = speculation.draft_model_config.quantization
    if quantization != expected:
        raise DRAFT_MODEL_OPTION.refusal(f"draft model with quantization {quantization!r}")


def settle_draft_model(config: VllmConfig) -> str | None:
    """Return the method of the draft model, None without one.

    For a layer the last block of a prefix hit is kept, which vLLM drops: one slot in it may be of
    another next token. This can make a draft wrong, and no token.
    """
    # With its type, by which `make upstream` finds the attribute below.
    speculation: SpeculativeConfig | None = get_draft_model(config)
    if speculation is None:
        return None
    if speculation.method in DRAFT_LAYERS:
        speculation.disable_eagle_block_drop = True
    return speculation.method


def _check_eagle(config: VllmConfig) -> None:
    """Raise unless both models are of known architectures with one kind of KV cache."""
    speculation, served = config.speculative_config, config.model_config
    assert speculation is not None and speculation.method is not None
    own = speculation.draft_model_config
    for role, model, known in zip(
        ("served", "draft"), (served, own), _EAGLE_MODELS[speculation.method], strict=True
    ):
        if model.architecture not in known:
            raise EAGLE_MODEL.refusal(f"{role} model {model.architecture}")
    if own.max_model_len < served.max_model_len:
        raise EAGLE_MODEL.refusal(
            f"draft model of {own.max_model_len} tokens, --max-model-len {served.max_model_len}"
        )
    if _get_cache(own) != _get_cache(served):
        raise EAGLE_MODEL.refusal(
            f"draft model with {_get_cache(own)}, served model with {_get_cache(served)}"
        )
    if speculation.method == EAGLE:
        _check_format(served, EAGLE_MODEL)


def _check_mtp(config: VllmConfig, *, on_npu: bool) -> None:
    """Raise unless the served model has one MTP layer, and is of a family that has been run."""
    speculation, served = config.speculative_config, config.model_config
    assert speculation is not None
    wanted, own = MTP_FAMILIES.get(served.architecture), speculation.draft_model_config
    if own.architecture != wanted:
        raise MTP_MODEL.refusal(
            f"served model {served.architecture}, draft model {own.architecture}"
        )
    # vLLM's class takes its sizes from the served model's configuration.
    layers = getattr(served.hf_config, "num_nextn_predict_layers", None)
    if layers != 1:
        raise MTP_MODEL.refusal(f"num_nextn_predict_layers {layers}")
    _check_format(served, MTP_MODEL, (_BLOCKS,) if on_npu else _QUANTIZED_MTP)


def _check_format(served: ModelConfig, feature: Feature, formats: Sequence[str] = ()) -> None:
    """Raise for quantised weights other than of ``formats``."""
    if served.quantization is None:
        return
    # vLLM's name of the quantisation, with the form that the checkpoint names.
    own, written = getattr(served.hf_config, "quantization_config", None) or {}, served.quantization
    if own.get("weight_block_size"):
        written = f"{written} in blocks"
    elif "format" in own:
        written = f"{written} {own['format']}"
    if written not in formats:
        raise feature.refusal(f"served model {served.architecture} with quantization {written!r}")


def _get_cache(model: ModelConfig) -> str:
    return f"{model.get_total_num_kv_heads()} KV heads of {model.get_head_size()}"
