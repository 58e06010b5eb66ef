"""Host memory for KV transfers (``rebel.kv_cache``)."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned_tensor(nbytes: int) -> Tensor:
    """A buffer of ``nbytes`` on the host."""
    return torch.empty(nbytes, dtype=torch.uint8)
