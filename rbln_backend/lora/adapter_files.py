"""Validation of an adapter's files: adapter_config.json, and the names and shapes of its tensors.

vLLM reads rank, alpha and rsLoRA of the configuration and ignores the rest. An adapter that depends
on other fields would therefore be applied wrongly without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rbln_backend.errors import AdapterError
from rbln_backend.lora.target import Target

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
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class TensorName:
    """Parsed name of a tensor: its module, and the module's name among the targets.

    `is_a`: True for lora_A, False for lora_B, None for the copy of the LM head's weight that PEFT
    writes beside an adapter of it.
    """

    module: str
    target: str
    is_a: bool | None


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


def check_tensors(
    shapes: Mapping[str, Sequence[int]],
    rank: int,
    targets: Mapping[str, Target],
    parse: Callable[[str], TensorName | None],
) -> None:
    """Raise `AdapterError` naming the first tensor that does not fit.

    `shapes` are those of the file, in elements. `parse` returns None for other tensors.
    """
    if not shapes:
        raise AdapterError("it has no tensors")
    sides: dict[str, set[bool]] = {}
    for name, shape in shapes.items():
        parsed = parse(name)
        if parsed is None:
            raise AdapterError(
                f"{name[:_SHOWN_CHARS]!r} is neither a lora_A.weight nor a lora_B.weight of a "
                "linear layer"
            )
        target = targets.get(parsed.target)
        if target is None:
            raise AdapterError(_unknown_module(parsed.module[:_SHOWN_CHARS], targets))
        if parsed.is_a is None:
            wanted = target.weight_misfit(shape)
        else:
            wanted = target.misfit(shape, rank, is_a=parsed.is_a)
            sides.setdefault(parsed.module, set()).add(parsed.is_a)
        if wanted is not None:
            raise AdapterError(f"{name!r}: the shape must be {wanted}, got {list(shape)}")
    for module, present in sides.items():
        if len(present) == 1:
            missing = "B" if True in present else "A"
            raise AdapterError(f"module {module!r} has no lora_{missing}.weight")


def _unknown_module(module: str, targets: Mapping[str, Target]) -> str:
    kinds = sorted({path.rpartition(".")[2] for path in targets})
    if module.rpartition(".")[2] in kinds:
        return f"the served model has no module {module!r}"
    return (
        f"module {module!r} cannot be adapted in the served model, whose layers for adapters are "
        f"{', '.join(kinds) or 'none'}"
    )
