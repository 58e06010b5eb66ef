"""The executor of an engine whose ranks are processes of this host."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds


class RanksExecutor(MultiprocExecutor):
    """vLLM's executor for several processes; pipeline stages send drafts with each result."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """As vLLM's; None with pipeline stages, where drafts come with each step's result."""
        if self.parallel_config.pipeline_parallel_size > 1:
            return None
        drafts: DraftTokenIds | None = super().take_draft_token_ids()
        return drafts
