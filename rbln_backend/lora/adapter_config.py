"""Validation of an adapter_config.json.

vLLM reads rank, alpha and rsLoRA and ignores the rest. An adapter that depends on other fields
would therefore be applied wrongly without an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend.errors import AdapterError

_REFUSED: Mapping[str, str] = {
    "use_dora": "magnitudes (DoRA) have no place in the slots",
    "modules_to_save": "whole modules are not replaced",
    "rank_pattern": "all modules of an adapter have one rank",
    "alpha_pattern": "all modules of an adapter have one scale",
    "lora_bias": "adapters have no biases",
    "fan_in_fan_out": "matrices are [outputs, inputs]",
    "trainable_token_indices": "embeddings are not adapted",
    "layer_replication": "the layers are those of the base model",
    "use_qalora": "inputs are not pooled",
    "alora_invocation_tokens": "an adapter applies from the first token on",
    "arrow_config": "adapters are not routed",
    "megatron_config": "only plain PEFT adapters are read",
}
# Their base weights are what the initialisation left of the published ones.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


def check_config(config: object, max_rank: int) -> None:
    """Raise ``AdapterError`` naming the first field that cannot be served, its value and why."""
    if not isinstance(config, dict):
        raise AdapterError("adapter_config.json holds no object")
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"peft_type is {config['peft_type']!r}; only 'LORA' is read")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"r is {rank!r}, not a positive integer")
    if rank > max_rank:
        raise AdapterError(f"r is {rank}, and --max-lora-rank is {max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise AdapterError(f"lora_alpha is {alpha!r}, not a number")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias is {config['bias']!r}: adapters have no biases")
    for field, reason in _REFUSED.items():
        if config.get(field):
            raise AdapterError(f"{field} is {config[field]!r}: {reason}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise AdapterError(
            f"init_lora_weights is {start!r}: it changes the base weights; save it as a plain "
            "adapter (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
