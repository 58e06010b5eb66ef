"""Run in a process of its own: engines over the SDK's double, whose requests differ in sampling.

Its argument is a JSON list of jobs: the model's path, the options of ``LLM``, and rounds of
requests, each a prompt (token ids) and the fields of its ``SamplingParams``, with how often all of
a round are sent. It prints the tokens of every job's rounds behind ``RESULT``.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

Request = tuple[list[int], dict[str, Any]]


def main() -> None:
    """All requests of a round are there from its start."""
    answers = [_answer(**job) for job in json.loads(sys.argv[1])]
    sys.stdout.write(f"RESULT {json.dumps(answers)}\n")


def _answer(path: str, options: dict[str, Any], rounds: list[tuple[list[Request], int]]) -> Any:
    from vllm import LLM, SamplingParams

    from rbln_backend.vllm_patches import inspect_models_here

    inspect_models_here()
    llm = LLM(path, **options)
    answers = []
    for distinct, times in rounds:
        requests = distinct * times
        prompts: Any = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [SamplingParams(ignore_eos=True, **fields) for _, fields in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return answers


if __name__ == "__main__":
    main()
