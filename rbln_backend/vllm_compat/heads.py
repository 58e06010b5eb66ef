"""vLLM's embedding and LM head, without the quantised weights that the module of those imports."""

from __future__ import annotations

from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]
