"""A head that will be tied takes no memory; any other is vLLM's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from rbln_backend.devices.emulated.layers import RblnLMHead, install_lm_head
from rbln_backend.devices.emulated.memory import choose_memory
from tests.unit.emulator.test_memory import resident_bytes

SIZES = (1 << 16, 512)
BYTES = 2 << 25


@pytest.fixture(autouse=True)
def mapped(native_kernels: Path) -> Iterator[None]:
    install_lm_head()
    choose_memory(mapped=True, huge_pages=False)
    yield
    choose_memory(mapped=False, huge_pages=False)


def make_head(*, is_tied: bool, device: str = "cpu") -> tuple[Any, int]:
    """A head as a model makes it, and by how much that has made the process larger."""
    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(
        hf_text_config=SimpleNamespace(tie_word_embeddings=is_tied)
    )
    # Heads of earlier tests would make the process smaller in between.
    gc.collect()
    with set_current_vllm_config(config), torch.device(device):
        before = resident_bytes()
        head = ParallelLMHead(*SIZES, params_dtype=torch.bfloat16, disable_tp=True)
        return head, resident_bytes() - before


def test_a_head_that_will_be_tied_takes_no_memory() -> None:
    head, grown = make_head(is_tied=True)
    assert type(head) is RblnLMHead
    assert (head.weight.shape, head.weight.dtype) == (SIZES, torch.bfloat16)
    assert grown < BYTES // 8
    table = VocabParallelEmbedding(*SIZES, params_dtype=torch.bfloat16, disable_tp=True)
    assert head.tie_weights(table).weight is table.weight


def test_one_that_is_filled_in_spite_of_it_is_a_head() -> None:
    head, _ = make_head(is_tied=True)
    rows = torch.randn(SIZES).bfloat16()
    head.weight.weight_loader(head.weight, rows)
    assert torch.equal(head.weight, rows)


def test_any_other_has_its_memory_at_once() -> None:
    assert make_head(is_tied=False)[1] > BYTES * 7 // 8
    assert make_head(is_tied=True, device="meta")[0].weight.is_meta
