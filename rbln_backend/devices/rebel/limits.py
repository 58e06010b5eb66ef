"""Properties of RBLN NPUs by product name, and limits of shapes, checked before weights are read.

None was measured by this project. Sources: the vendor's vllm-rbln 0.12 (platform, worker utilities,
attention; a chunk lies in one block), the RBLN documents (blocks of 512 to 16,384 positions, a
power of two) and the vendor's offline path (windows up to 32,767). A name that vllm-rbln does not
tell apart is treated as the oldest kind that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rbln_backend.config import RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.limits import MROPE
from rbln_backend.settings import later_rule, newer_sdk

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_GIB = 1 << 30
_MIB = 1 << 20

RUNTIME_BYTES = 256 * _MIB
"""Bytes that a compiled graph reserves on each chiplet, by the vendor's estimate."""


@dataclass(frozen=True, slots=True)
class Npu:
    """One NPU, e.g. RBLN-CR13."""

    name: str
    memory_bytes: int
    """Bytes of its memory that programs can use."""
    chiplets: int
    """Parts that each hold a share of every tensor and a runtime of every graph."""
    appends_windows: bool
    """Sliding windows lie in pages; otherwise a window is one block whose content is shifted."""
    stores_across_blocks: bool
    """A chunk of a prompt may begin in one block and end in the next."""
    wants_longest_first: bool
    """Decode kernels skip the rows after the last one that reaches into a block."""
    splits_tensors: bool
    """A rank may be given several."""

    @classmethod
    def named(cls, name: str) -> Npu:
        """Raises ``ConfigError`` for a name that is no RBLN NPU's."""
        model = name.strip().upper()
        if model.startswith("RBLN-CA"):
            return cls(model, 16 * _GIB - 288 * _MIB, 1, False, False, False, True)
        if model.startswith("RBLN-CR"):
            newest = model == "RBLN-CR13"
            return cls(model, 140 * _GIB, 4, newest, newest, newest, False)
        raise ConfigError(
            f"NPU name {name!r} is not known; names begin with RBLN-CA (ATOM) or RBLN-CR (REBEL)"
        )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of the NPUs of one rank, as the vendor estimates what it goes into."""

    npu: Npu
    devices: int
    num_graphs: int
    num_kv_heads: int
    """Of the rank."""

    @property
    def total_bytes(self) -> int:
        return self.npu.memory_bytes * self.devices

    @property
    def runtime_bytes(self) -> int:
        """Bytes that all graphs reserve."""
        return RUNTIME_BYTES * self.num_graphs * self._parts

    @property
    def kv_copies(self) -> int:
        """Copies of each KV head: more than one if there are fewer heads than parts."""
        return max(1, self._parts // self.num_kv_heads)

    @property
    def _parts(self) -> int:
        return self.npu.chiplets * self.devices

    def adapter_bytes(self, slot_bytes: int) -> int:
        """Bytes of adapter slots of ``slot_bytes``: graphs may want their inputs on every part."""
        return slot_bytes * self._parts

    def kv_budget_bytes(self, utilization: float, weight_bytes: int, slot_bytes: int = 0) -> int:
        """Bytes for KV caches, each head counted once; may be negative.

        ``slot_bytes``: of adapters.
        """
        fixed = weight_bytes + self.runtime_bytes + self.adapter_bytes(slot_bytes)
        free = int(self.total_bytes * utilization) - fixed
        return free // self.kv_copies


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


def settle_npu(vllm_config: VllmConfig, rbln: RblnConfig, npu: Npu) -> RblnConfig:
    """Settle one prefill shape, and one length of steps with drafts: each graph takes NPU memory.

    Raises ``ConfigError`` for shapes that the compiler rejects.
    """
    if rbln.use_custom_kernel:
        raise ConfigError(
            "use_custom_kernel (RBLN_USE_CUSTOM_KERNEL): these kernels are the vendor's own "
            "(vllm-rbln) and not part of this backend; unset it, or use device='emulated'"
        )
    # None in a configuration that vLLM makes without a model.
    model: ModelConfig | None = vllm_config.model_config
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    chunks = rbln.prefill_chunk_buckets or (chunk,)
    if model is not None and model.attn_type != "encoder_only":
        block_size = vllm_config.cache_config.block_size
        check_block(block_size)
        check_chunks(block_size, chunks)
        check_num_blocks(vllm_config.cache_config.num_gpu_blocks_override or 0)
        assert rbln.sub_block_size is not None
        check_reuse_unit(npu, rbln.sub_block_size, chunk)
    settled: dict[str, Any] = {"prefill_chunk_buckets": chunks}
    if (speculation := vllm_config.speculative_config) is not None:
        # One length at every decode bucket, as in vllm-rbln 0.12 (``run_model_graphs``).
        settled["verify_lengths"] = rbln.verify_lengths or (speculation.num_speculative_tokens + 1,)
        settled["verify_tokens"] = (
            rbln.verify_tokens or vllm_config.scheduler_config.max_num_batched_tokens
        )
    return rbln.model_copy(update=settled)


def check_release(vllm_config: VllmConfig, rbln: RblnConfig) -> None:
    """Raise ``ConfigError`` for settings that SDK 0.12.1 does not take, where it is installed.

    Call it while the block size and the chunk are as they were given.
    """
    model: ModelConfig | None = vllm_config.model_config
    version, cache = newer_sdk(), vllm_config.cache_config
    if version is None or model is None:
        return
    if model.uses_mrope:
        raise MROPE.refusal(f"RBLN SDK {version}, architecture {model.architecture!r}")
    devices, flag = rbln.num_devices_per_local_rank, "--max-num-batched-tokens"
    if devices > 1:
        name = "num_devices_per_local_rank"
        raise ConfigError(later_rule(name, f"{name}={devices}", version))
    if not cache.user_specified_block_size:
        raise ConfigError(later_rule("--block-size", "no --block-size", version))
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    if model.attn_type != "encoder_only" and chunk > cache.block_size:
        shown = f"{flag} {chunk}, --block-size {cache.block_size}"
        raise ConfigError(later_rule(flag, shown, version))
