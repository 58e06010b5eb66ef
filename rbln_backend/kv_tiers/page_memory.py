"""Host memory for pages on their way between the KV cache and a tier."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def new_page(num_bytes: int) -> Tensor:
    """Return memory for a page, bytes [num_bytes], of undefined content.

    It lies on small pages of the system. Large tensors lie on huge pages, and on virtual machines
    the first use of one can take milliseconds, longer than writing the file.
    """
    memory = mmap.mmap(-1, num_bytes)
    with suppress(OSError):
        # A system without huge pages does not know the advice.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
