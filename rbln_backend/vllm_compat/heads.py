"""vLLM's layer of the LM head, without the quantised weights that the module of those imports."""

from __future__ import annotations

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

__all__ = ["ParallelLMHead"]
