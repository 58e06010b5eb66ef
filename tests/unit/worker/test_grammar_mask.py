"""Grammar masks on logits, beside vLLM's own function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.worker.sampling import GrammarMask

NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [{}, {"a": [5], "c": [1, 2]}], ids=["plain", "drafts"])
@pytest.mark.parametrize("vocabulary", [64, 70])
def test_rows_are_masked_as_vllm_masks_them(
    dtype: torch.dtype, drafts: dict[str, list[int]], vocabulary: int
) -> None:
    rng = np.random.default_rng(1)
    # "gone" has left the batch; "b" has no grammar.
    constrained = ["d", "gone", "a", "c"]
    rows = sum(1 + len(drafts.get(name, ())) for name in constrained)
    bits = rng.integers(-(2**31), 2**31, (rows, -(-vocabulary // 32)), dtype=np.int32)
    bits[0] = -1
    grammar = GrammarOutput(constrained, bits)
    scheduled: Any = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    batch: Any = SimpleNamespace(
        req_ids=NAMES, req_id_to_index={name: row for row, name in enumerate(NAMES)}
    )
    count = sum(1 + len(drafts.get(name, ())) for name in NAMES)
    logits = torch.randn(count, vocabulary, generator=torch.manual_seed(0)).to(dtype)
    expected = logits.clone()
    apply_grammar_bitmask(scheduled, grammar, batch, expected)
    found = GrammarMask(MetricsBoard(None, "test")).apply(scheduled, grammar, batch, logits)
    assert torch.equal(found, expected)
    assert torch.isinf(found).any()
