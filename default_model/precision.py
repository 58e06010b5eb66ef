"""What matrix products are computed in: bfloat16 where the processor has it, float32 elsewhere."""

from __future__ import annotations

import torch

from rbln_backend.devices.emulated.build import cpu_features


def fast_products() -> torch.autocast:
    """Return a context of this thread whose products are the processor's fastest.

    Weights, gradients and optimizer stay float32. Without the instructions bfloat16 is emulated,
    and takes ten times as long as all the rest of a step.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled="avx512_bf16" in cpu_features())
