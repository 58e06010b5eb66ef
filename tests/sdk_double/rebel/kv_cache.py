"""Host memory for KV transfers (``rebel.kv_cache``)."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def aligned_tensor(count: int) -> Tensor:
    """Return ``count`` numbers of float16 on whole pages of the host: numpy has no bfloat16.

    vllm_rbln divides bytes by two for it and views the memory as its cache
    (rbln_nixl/registration.py, ``_aligned_like``).
    """
    return torch.frombuffer(mmap.mmap(-1, 2 * count), dtype=torch.float16)
