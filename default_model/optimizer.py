"""The optimizer: Muon for hidden matrices, Adam for embedding and norms, and its schedule."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import torch
from transformers import LlamaForCausalLM

from default_model.muon import muon_step

MUON_LR = 0.006
# Of the hidden matrices: an orthogonal update is as large when its gradient is noise, and without
# decay such updates add up.
WEIGHT_DECAY = 0.2
ADAM_LR = 0.003
_MOMENTUM = 0.95
WARM_UP_STEPS = 40
# Share of the steps after which the rate falls.
PLATEAU = 0.1


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the full rate at `step` of `steps`: warm-up, plateau, straight down."""
    return min((step + 1) / WARM_UP_STEPS, 1.0, (steps - step) / (steps * (1 - PLATEAU)))


class Optimizer:
    """Holds the state of both and applies a step."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        named = dict(model.named_parameters())
        self._hidden = {k: p for k, p in named.items() if p.ndim == 2 and "embed" not in k}
        others = [p for k, p in named.items() if k not in self._hidden]
        self._momenta = {k: torch.zeros_like(p) for k, p in self._hidden.items()}
        self._adam = torch.optim.Adam(others, lr=ADAM_LR, betas=(0.9, 0.98), eps=1e-10)

    @torch.no_grad()
    def step(self, rate: float, pool: Executor) -> None:
        """Update the weights from their gradients; `rate` is the share of the full rates."""

        def update(name: str) -> None:
            torch.set_num_threads(1)
            with torch.no_grad():
                weight = self._hidden[name]
                assert weight.grad is not None
                weight.mul_(1.0 - MUON_LR * rate * WEIGHT_DECAY)
                muon_step(weight, weight.grad, self._momenta[name], lr=MUON_LR * rate,
                          decay=_MOMENTUM)  # fmt: skip

        list(pool.map(update, self._hidden))
        for group in self._adam.param_groups:
            group["lr"] = ADAM_LR * rate
        self._adam.step()

    def state(self) -> dict[str, Any]:
        """Return what a later run needs to go on."""
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        for name, momentum in state["momenta"].items():
            self._momenta[name].copy_(momentum)
        self._adam.load_state_dict(state["adam"])
