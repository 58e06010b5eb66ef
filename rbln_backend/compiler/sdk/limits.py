"""Shape limits of the SDK's compiler, checked before weights are read.

Source: the RBLN documents (blocks of 512 to 16,384 positions, a power of two), the vendor's
offline path (windows up to 32,767) and vllm-rbln 0.12 (a chunk lies in one block).
"""

from __future__ import annotations

from collections.abc import Sequence

from rbln_backend.compiler.sdk.npu import Npu
from rbln_backend.errors import ConfigError

DEFAULT_BLOCK_SIZE = 1024
_SMALLEST_BLOCK, _LARGEST_BLOCK = 512, 16384
_LARGEST_WINDOW = 32767
LARGEST_NUM_BLOCKS = 2**15 - 1
"""The attention ops number blocks in 16 bits (vllm-rbln 0.12, ``dynamic_kv_sizer.py``)."""


def check_block(block_size: int) -> None:
    """Raise ``ConfigError`` for a block that the compiler refuses."""
    in_range = _SMALLEST_BLOCK <= block_size <= _LARGEST_BLOCK
    if not in_range or block_size & (block_size - 1):
        raise ConfigError(
            f"--block-size {block_size}: on an NPU a block is a power of two from "
            f"{_SMALLEST_BLOCK} to {_LARGEST_BLOCK} tokens"
        )


def check_num_blocks(num_blocks: int) -> None:
    """Raise ``ConfigError`` for more blocks than the attention ops can number."""
    if num_blocks > LARGEST_NUM_BLOCKS:
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks: on an NPU there are at most {LARGEST_NUM_BLOCKS}; "
            "set --num-gpu-blocks-override to that or less, or --block-size higher"
        )


def fitting_chunk(block_size: int, longest: int) -> int:
    """The smallest of the block, its half, its quarter and so on that holds ``longest`` tokens."""
    chunk = block_size
    while chunk % 2 == 0 and chunk // 2 >= longest:
        chunk //= 2
    return chunk


def check_chunks(block_size: int, chunks: Sequence[int]) -> None:
    """Raise ``ConfigError`` for a chunk that would end in another block than it begins in."""
    for chunk in chunks:
        if block_size % chunk:
            raise ConfigError(
                f"a prefill chunk of {chunk} tokens (--max-num-batched-tokens, "
                f"prefill_chunk_buckets) does not divide the block of {block_size} tokens "
                "(--block-size), as it must on an NPU"
            )


def check_reuse_unit(npu: Npu, unit: int, chunk: int) -> None:
    """Raise ``ConfigError`` where a chunk that begins after a hit would cross into a block."""
    if unit < chunk and not npu.stores_across_blocks:
        raise ConfigError(
            f"sub_block_size={unit} is smaller than the prefill chunk of {chunk} tokens: a chunk "
            f"may then cross into the next block, which {npu.name} cannot store"
        )


def check_windows(windows: Sequence[int]) -> None:
    """Raise ``ConfigError`` for a window that the kernels do not have."""
    for window in windows:
        if window > _LARGEST_WINDOW:
            raise ConfigError(
                f"a sliding window of {window} tokens: the NPU's kernels have at most "
                f"{_LARGEST_WINDOW}"
            )
