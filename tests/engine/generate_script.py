"""An engine of any number of ranks in a process of its own, run by ``script.run_script``.

The argument is ``[checkpoint, options of AsyncEngineArgs, prompts, number of tokens, adapters]``,
adapters being a folder or null per prompt, or empty. The result has the tokens of every prompt,
greedily, each with its log-probability. Requests go to the data-parallel engines in turn. With
a sixth item, steps check as many drafts as there are.
"""

import asyncio
import json
import sys
from itertools import zip_longest
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from rbln_backend.vllm_patches import inspect_models_here


async def answer(
    engine: AsyncLLM,
    number: int,
    prompt: list[int],
    num_tokens: int,
    engines: int,
    lora: LoRARequest | None,
) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    last = None
    async for output in engine.generate(
        {"prompt_token_ids": prompt},
        params,
        str(number),
        lora_request=lora,
        data_parallel_rank=number % engines if engines > 1 else None,
    ):
        last = output.outputs[0]
    assert last is not None
    assert last.logprobs is not None
    tokens = list(last.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, last.logprobs, strict=True)]
    return {"tokens": tokens, "logprobs": logprobs}


def check_all_drafts(worker: Any) -> None:
    from tests.engine.support import MOST, AnyLength

    # A stage that makes no tokens makes no drafts.
    if (drafting := getattr(worker.worker._runner, "_drafting", None)) is not None:
        drafting._budget = AnyLength(MOST + 1)


async def main(
    checkpoint: str,
    options: Any,
    prompts: list[list[int]],
    num_tokens: int,
    adapters: list[str | None],
    checks_all_drafts: bool = False,
) -> None:
    inspect_models_here()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=checkpoint, **options))
    engines = options.get("data_parallel_size", 1)
    folders = list(dict.fromkeys(filter(None, adapters)))
    loras = {path: LoRARequest(path, n, path) for n, path in enumerate(folders, 1)}
    try:
        for lora in loras.values():
            await engine.add_lora(lora)
        if checks_all_drafts:
            await engine.collective_rpc(check_all_drafts)
        answers = await asyncio.gather(
            *(
                answer(engine, i, p, num_tokens, engines, loras.get(path or ""))
                for i, (p, path) in enumerate(zip_longest(prompts, adapters))
            )
        )
    finally:
        engine.shutdown()
    sys.stdout.write(f"RESULT {json.dumps(answers)}\n")


if __name__ == "__main__":
    asyncio.run(main(*json.loads(sys.argv[1])))
