"""Run in a process of its own: engines over the SDK's double that share their experts.

Its argument is a JSON object: the model's path, options of vLLM's engine, the prompts (token ids)
and how many tokens to answer with. It prints the tokens of each round behind ``RESULT``: all on
the second engine, one after the other; all at once, on all. There are two engines by default.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def main() -> None:
    """Workers are new processes: a fork would inherit the groups of this one."""
    answers = asyncio.run(_answer(**json.loads(sys.argv[1])))
    sys.stdout.write(f"RESULT {json.dumps(answers)}\n")


async def _answer(
    path: str, options: dict[str, Any], prompts: list[list[int]], max_tokens: int
) -> list[list[list[int]]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {"data_parallel_size": 2} | options
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **options))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    async def generate(name: str, place: int, rank: int) -> list[int]:
        prompt: Any = {"prompt_token_ids": prompts[place]}
        outputs = llm.generate(prompt, params, name, data_parallel_rank=rank)
        last = [output async for output in outputs][-1]
        return list(last.outputs[0].token_ids)

    places = range(len(prompts))
    try:
        # The first engine runs padding.
        alone = [await generate(f"alone-{place}", place, 1) for place in places]
        ranks = [place % options["data_parallel_size"] for place in places]
        all_of = [generate(f"all-{place}", place, ranks[place]) for place in places]
        return [alone, list(await asyncio.gather(*all_of))]
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main()
