"""The device's random numbers: torch's, on the CPU."""

from __future__ import annotations

import torch


def manual_seed(seed: int) -> None:
    """Seed what the sampling ops draw from."""
    torch.manual_seed(seed)
