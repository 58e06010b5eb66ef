"""Engine of a side: vLLM's offline engine, or its serving engine for data-parallel ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.config import ModelConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from rbln_backend.parity.job import Job
from rbln_backend.parity.runners.forced_tokens import ForcedTokens


class Engine(Protocol):
    """Interface of a runner's engine."""

    model_config: ModelConfig
    tokenizer: Any
    num_at_once: int
    """Requests that run at the same time, over all ranks."""

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Run all ``prompts`` to the end; outputs are in their order."""

    def close(self) -> None:
        """End the engine's processes."""


def start_engine(job: Job) -> Engine:
    """Load and compile an engine; raises vLLM's errors."""
    ranks = int(job.engine_args.get("data_parallel_size", 1))
    return OfflineEngine(job) if ranks == 1 else RankedEngine(job, ranks)


class OfflineEngine:
    """vLLM's ``LLM``, whose first rank is in this process, so that its layers are accessible."""

    def __init__(self, job: Job) -> None:
        self.llm = LLM(job.model, logits_processors=[ForcedTokens], **job.engine_args)
        self.model_config = self.llm.model_config
        self.tokenizer: Any = self.llm.get_tokenizer()
        self.num_at_once = int(job.engine_args["max_num_seqs"])
        self._lora = _adapter(job)

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: Any = self.llm.generate(
            inputs, list(params), use_tqdm=False, lora_request=self._lora
        )
        return list(outputs)

    def close(self) -> None:
        """Do nothing: the engine ends with this process."""


class RankedEngine:
    """vLLM's ``AsyncLLM``, because ``LLM`` drives one engine and each data-parallel rank is one.

    Prompts go to the ranks in turn, so that every rank is compared.
    """

    def __init__(self, job: Job, ranks: int) -> None:
        self._ranks = ranks
        self._lora = _adapter(job)
        self._number = 0
        # The engine's tasks run in this loop, only during calls.
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(_start(job))
        self.model_config = self._engine.model_config
        self.tokenizer: Any = self._engine.get_tokenizer()
        self.num_at_once = int(job.engine_args["max_num_seqs"]) * ranks

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        return self._runner.run(self._all(prompts, params))

    def close(self) -> None:
        self._engine.shutdown()
        self._runner.close()

    async def _all(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        jobs = [
            self._one(index % self._ranks, prompt, how)
            for index, (prompt, how) in enumerate(zip(prompts, params, strict=True))
        ]
        return await asyncio.gather(*jobs)

    async def _one(self, rank: int, prompt: list[int], params: SamplingParams) -> RequestOutput:
        self._number += 1
        outputs = self._engine.generate(
            {"prompt_token_ids": prompt},
            params,
            request_id=f"parity-{self._number}",
            lora_request=self._lora,
            data_parallel_rank=rank,
        )
        # FINAL_ONLY: there is one.
        return [output async for output in outputs][-1]


async def _start(job: Job) -> AsyncLLM:
    args = AsyncEngineArgs(model=job.model, logits_processors=[ForcedTokens], **job.engine_args)
    return AsyncLLM.from_engine_args(args)


def _adapter(job: Job) -> LoRARequest | None:
    return None if job.lora is None else LoRARequest("parity", 1, job.lora)
