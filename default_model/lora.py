"""Linear layers with a low-rank adapter beside them, and the adapter's files as PEFT has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

RANK = 8
ALPHA = 16
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """y = W x + (ALPHA / RANK) B A x, with W as it was."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(RANK, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, RANK))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [..., in_features]; returns [..., out_features]."""
        low = functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        added: torch.Tensor = self.base(x) + low * (ALPHA / RANK)
        return added


def add_adapter(model: LlamaForCausalLM, seed: int) -> dict[str, LoraLinear]:
    """Put an adapter beside every linear layer and freeze the rest; returns the layers by name."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    found: dict[str, LoraLinear] = {}
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf in _TARGETS and isinstance(module, nn.Linear):
            found[name] = LoraLinear(module)
            setattr(model.get_submodule(parent), leaf, found[name])
    return found


def _config() -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "default-model",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(_TARGETS),
    }


def save_adapter(layers: dict[str, LoraLinear], folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in bfloat16, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        for part, matrix in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
            key = f"base_model.model.{name}.{part}.weight"
            tensors[key] = matrix.detach().to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_config(), indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
