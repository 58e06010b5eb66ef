"""Which graphs a server needs: a pure function of its bucket tables."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.compiler.port import GraphSpec, Phase

# Rows of one run of the LM head alone, for prompt logprobs. Prompts are cut into pieces of this
# size, so that a large vocabulary does not need [chunk, vocab] logits at once.
LOGITS_ROWS = 32


def plan(tables: Mapping[Phase, BucketTable], *, has_logits: bool) -> list[GraphSpec]:
    """Every graph, smallest first within a phase: memory trouble shows before the long compiles.

    ``has_logits``: the model generates text (False for pooling models).
    """
    specs = [GraphSpec.of(phase, size) for phase, table in tables.items() for size in table]
    if has_logits:
        specs.append(GraphSpec.of(Phase.LOGITS, LOGITS_ROWS))
    return specs
