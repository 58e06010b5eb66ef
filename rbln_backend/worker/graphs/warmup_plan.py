"""The plan of all graphs that a server needs: a pure function of its bucket tables."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend.bucketing.chunk_plan import prompts_of
from rbln_backend.bucketing.engine_buckets import DraftSizes
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.verify import NO_DRAFTS, VerifyTable
from rbln_backend.core import GraphSpec, Phase

# Rows of one run of the LM head alone, for prompt logprobs. Prompts are split into parts of this
# size, so that a large vocabulary does not need [chunk, vocab] logits at once.
LOGITS_ROWS = 32

ADAPTER_PRODUCT = GraphSpec.of(Phase.ADAPTERS, 8)
"""The graph with which a start on an NPU tests adapter slots."""


def plan(
    tables: Mapping[Phase, BucketTable],
    verify: VerifyTable = NO_DRAFTS,
    *,
    has_logits: bool,
    tests_slots: bool = False,
    prompts: int = 1,
    drafted: DraftSizes | None = None,
) -> list[GraphSpec]:
    """Return every graph, smallest first within a phase.

    ``verify``: sizes of steps that check drafts. ``has_logits``: False for pooling models.
    ``tests_slots``: True with adapters on an NPU.
    ``prompts``: most prompts of the largest prefill chunk. ``drafted``: sizes of the draft
    model's graphs, None without one.
    """
    specs = [spec_of(phase, size, prompts) for phase, table in tables.items() for size in table]
    specs += [GraphSpec.of(Phase.VERIFY, bucket, length) for bucket, length in verify]
    if has_logits:
        specs.append(GraphSpec.of(Phase.LOGITS, LOGITS_ROWS))
    if tests_slots:
        specs.append(ADAPTER_PRODUCT)
    return specs + draft_specs(drafted, prompts)


def draft_specs(drafted: DraftSizes | None, prompts: int = 1) -> list[GraphSpec]:
    """Return the graphs of a draft model, smallest first; none without one."""
    if drafted is None:
        return []
    specs = [GraphSpec.of(Phase.DRAFT, size) for size in drafted.requests]
    if drafted.length is None:
        return specs
    specs += [GraphSpec.of(Phase.DRAFT, size, drafted.length) for size in drafted.requests]
    return specs + [spec_of(Phase.DRAFT_PREFILL, size, prompts) for size in drafted.chunks]


def spec_of(phase: Phase, size: int, prompts: int) -> GraphSpec:
    """Return the graph of a chunk or a decode bucket; ``prompts`` as for ``plan``."""
    return GraphSpec.of(phase, size, prompts=prompts_of(size, prompts) if phase.takes_chunk else 1)
