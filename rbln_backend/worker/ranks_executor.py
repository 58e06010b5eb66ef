"""The executor of an engine whose ranks are processes of this host."""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds

from rbln_backend.vllm_compat.settled import compiled_sizes, settled


class RanksExecutor(MultiprocExecutor):
    """vLLM's executor for several processes; a change of sizes reaches the scheduler of this one.

    Calls and steps reach every rank through one queue, so all of them swap between the same two
    steps. The scheduler takes the sizes before it plans the next one.
    """

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> Any:
        """As vLLM's; ``args`` are its other parameters."""
        results = super().collective_rpc(method, *args, **options)
        if method == "advance_bucket_change" and all(r["phase"] == "done" for r in results):
            sizes = compiled_sizes(self.vllm_config).resized(
                results[0]["decode"], results[0]["prefill"]
            )
            settled(self.vllm_config).size_changes.announce(sizes)
        return results

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """As vLLM's; None with pipeline stages, where drafts come with each step's result."""
        if self.parallel_config.pipeline_parallel_size > 1:
            return None
        drafts: DraftTokenIds | None = super().take_draft_token_ids()
        return drafts
