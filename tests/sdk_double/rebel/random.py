"""The device's random numbers: not the host's, and others in each process without a seed."""

from __future__ import annotations

import torch

GENERATOR = torch.Generator()
GENERATOR.seed()


def manual_seed(seed: int) -> None:
    """Seed what the sampling ops draw from."""
    GENERATOR.manual_seed(seed)
