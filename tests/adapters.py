"""Random LoRA adapters as PEFT writes them, and checkpoints with an adapter merged in."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.reference import reference_generate

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EVERY_LINEAR = (*ATTENTION, *MLP)
HEAD = ("lm_head",)
# Of the weights' own size: strong enough to change most tokens, weak enough to keep text sane.
STRENGTH = 0.5

PREFIX = "base_model.model."


def make_adapter(
    checkpoint: Path,
    path: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = EVERY_LINEAR,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    experts: Literal["no", "single", "stacked"] = "no",
    **config: Any,
) -> Path:
    """Write an adapter for every module of `checkpoint` whose name ends in one of `targets`.

    `experts`: whether those of mixtures are among the modules, or changed in stacks, or not at all.
    `config` adds fields to adapter_config.json or replaces them. Returns `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    fields |= {"base_model_name_or_path": str(checkpoint), "target_modules": list(targets)}
    fields |= {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none"}
    fields |= {"modules_to_save": None, "use_rslora": False, "use_dora": False} | config
    (path / "adapter_config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(seed)
    strength = STRENGTH / (_scale(fields) * rank**0.5)
    tensors: dict[str, Tensor] = {}
    skipped = ("router",) if experts == "single" else ("router", "experts")
    for module, (outputs, inputs) in _modules(checkpoint, targets, skipped):
        a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, rank, generator=generator) * STRENGTH
        b = b / (_scale(fields) * rank**0.5)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, path / "adapter_model.safetensors")
    if experts == "stacked":
        stack_experts(checkpoint, path, rank=rank, strength=strength, seed=seed)
    return path


def merge(checkpoint: Path, adapter: Path, path: Path) -> Path:
    """Write `checkpoint` in float32 with `adapter` added to its weights; returns `path`."""
    shutil.copytree(checkpoint, path)
    weights = load_file(path / "model.safetensors")
    matrices = load_file(adapter / "adapter_model.safetensors")
    scale = _scale(json.loads((adapter / "adapter_config.json").read_text()))
    weights = merge_stacks(weights, matrices, scale)
    singles = (name for name in matrices if not is_stack(name))
    for name in (name for name in singles if name.endswith(".lora_A.weight")):
        module = name.removesuffix(".lora_A.weight")
        delta = matrices[f"{module}.lora_B.weight"].double() @ matrices[name].double()
        weight = f"{module.removeprefix(PREFIX)}.weight"
        weights[weight] = (weights[weight].double() + scale * delta).float()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def assert_worth_merged_weights(
    llm: LLM, adapter: Path, merged: Path, prompts: Sequence[list[int]], params: SamplingParams
) -> None:
    """Every greedy token with `adapter` is the one that transformers has for `merged`."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, str(adapter)),
    )
    assert params.max_tokens is not None
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_generate(merged, prompt, params.max_tokens).token_ids
        assert list(output.outputs[0].token_ids) == expected


def _scale(config: dict[str, Any]) -> float:
    rank = config["r"] ** 0.5 if config["use_rslora"] else config["r"]
    return float(config["lora_alpha"] / rank)


def _modules(
    checkpoint: Path, targets: Sequence[str], skipped: Sequence[str]
) -> Iterator[tuple[str, list[int]]]:
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            module = name.removesuffix(".weight")
            shape = file.get_slice(name).get_shape()
            is_skipped = any(part in skipped for part in module.split("."))
            if module != name and module.rpartition(".")[2] in targets and not is_skipped:
                yield module, shape


# ---------------------------------------------------------------------------------- expert adapters
# Adapters of stacked experts as PEFT writes them for parameters, and what they add to weights.
#
# A is [experts * r, inputs], expert by expert; B is [outputs, r * experts], its columns going
# through the experts for each of the r (PEFT's ``ParamWrapper.get_delta_weight``).
_A, _B = ".lora_A.weight", ".lora_B.weight"
_FIRST, _SECOND = ("gate_up_proj", "down_proj")


def stack_experts(
    checkpoint: Path, adapter: Path, *, rank: int, strength: float, seed: int, outer: str = _SECOND
) -> Path:
    """Add a pair for each projection of every layer's experts to `adapter`; returns it.

    `outer` is the projection that is called `experts`, the other `experts.base_layer`.
    """
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for layer, (experts, hidden, inner) in _layers(weights).items():
        for projection, inputs, outputs in ((_FIRST, hidden, 2 * inner), (_SECOND, inner, hidden)):
            name = PREFIX + layer + ("" if projection == outer else ".base_layer")
            a = torch.randn(experts * rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank * experts, generator=generator) * strength
            tensors |= {name + _A: a, name + _B: b}
    save_file(tensors, adapter / "adapter_model.safetensors")
    return adapter


def merge_stacks(
    weights: dict[str, Tensor], matrices: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """`weights` in float32 with the stacked experts of `matrices` added."""
    for layer, (experts, hidden, inner) in _layers(weights).items():
        for name in (PREFIX + layer, f"{PREFIX}{layer}.base_layer"):
            if name + _A not in matrices:
                continue
            a = matrices[name + _A].double().reshape(experts, -1, matrices[name + _A].shape[1])
            b = matrices[name + _B].double().reshape(len(matrices[name + _B]), -1, experts)
            delta = scale * torch.einsum("ore,eri->eoi", b, a)
            is_first = tuple(delta.shape[1:]) == (2 * inner, hidden)
            weights |= _added(weights, layer, delta, is_first=is_first)
    return weights


def is_stack(name: str) -> bool:
    return ".experts.lora_" in name or ".experts.base_layer." in name


def _layers(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int, int]]:
    """By the modules of experts: how many, hidden and intermediate size."""
    found: dict[str, tuple[int, int, int]] = {}
    for name in (name for name in weights if ".experts." in name):
        layer = name[: name.index(".experts.")] + ".experts"
        stack, single = weights.get(f"{layer}.{_SECOND}"), f"{layer}.0.{_SECOND}.weight"
        if stack is not None:
            experts, inner, hidden = stack.shape
            found[layer] = experts, hidden, inner
        elif single in weights:
            count = len({each.split(".")[-3] for each in weights if each.startswith(f"{layer}.")})
            hidden, inner = weights[single].shape
            found[layer] = count, hidden, inner
    return found


def _added(
    weights: Mapping[str, Tensor], layer: str, delta: Tensor, *, is_first: bool
) -> dict[str, Tensor]:
    stacked = f"{layer}.{_FIRST if is_first else _SECOND}"
    if stacked in weights:
        # [experts, inputs, outputs]
        return {stacked: (weights[stacked].double() + delta.transpose(1, 2)).float()}
    made = {}
    for number, change in enumerate(delta):
        parts = ("gate_proj", "up_proj") if is_first else ("down_proj",)
        for part, share in zip(parts, change.chunk(len(parts)), strict=True):
            name = f"{layer}.{number}.{part}.weight"
            made[name] = (weights[name].double() + share).float()
    return made
