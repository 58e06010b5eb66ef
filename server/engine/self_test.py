"""Tests a new engine with one small request, which also starts vLLM's tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.frontend import LaunchError

if TYPE_CHECKING:
    from vllm.tasks import SupportedTask
    from vllm.v1.engine.async_llm import AsyncLLM

_TIMEOUT_S = 120.0
_REQUEST_ID = "self-test"


async def self_test(engine: AsyncLLM, tasks: tuple[SupportedTask, ...]) -> None:
    """Generate one token or one pooled vector. Raises `LaunchError` or `TimeoutError`."""
    work = _generate(engine) if "generate" in tasks else _pool(engine, tasks)
    if not await asyncio.wait_for(work, _TIMEOUT_S):
        raise LaunchError("the self-test got no result")


async def _generate(engine: AsyncLLM) -> bool:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    async for output in engine.generate(tokens_input([1]), params, _REQUEST_ID):
        if output.finished:
            return len(output.outputs[0].token_ids) == 1
    return False


async def _pool(engine: AsyncLLM, tasks: tuple[SupportedTask, ...]) -> bool:
    from vllm import PoolingParams
    from vllm.inputs import tokens_input

    task = engine.model_config.get_pooling_task(tasks)
    params = PoolingParams(task=task)
    async for output in engine.encode(tokens_input([1]), params, _REQUEST_ID):
        if output.finished:
            return int(output.outputs.data.numel()) > 0
    return False
