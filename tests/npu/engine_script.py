"""Run in a process of its own: engines over the SDK's double, one after another.

Its argument is a JSON list of jobs: the model's path, the options of ``LLM``, batches of prompts
(token ids) and how many tokens to answer with. It prints the greedy tokens of every job's batches
behind ``RESULT``.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any


def main() -> None:
    """Each batch is answered before the next is sent: later ones meet what earlier ones left."""
    answers = [_answer(**job) for job in json.loads(sys.argv[1])]
    sys.stdout.write(f"RESULT {json.dumps(answers)}\n")


def _answer(
    path: str, options: dict[str, Any], batches: list[list[list[int]]], max_tokens: int
) -> list[list[list[int]]]:
    from vllm import LLM, SamplingParams

    llm = LLM(path, **options)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    answers = []
    for batch in batches:
        prompts = [{"prompt_token_ids": prompt} for prompt in batch]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return answers


if __name__ == "__main__":
    main()
