"""Run in a process of its own: prompt log-probabilities of an engine over the SDK's double.

Its argument is a JSON list of jobs: the model's path, the options of ``LLM``, and prompts (token
ids). Behind ``RESULT`` it prints, for each prompt, its answer's tokens and, for each of its tokens
after the first, the log-probability and the rank.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    answers = [_answer(**job) for job in json.loads(sys.argv[1])]
    sys.stdout.write(f"RESULT {json.dumps(answers)}\n")


def _answer(path: str, options: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
    from vllm import LLM, SamplingParams

    from rbln_backend.vllm_patches import inspect_models_here

    inspect_models_here()
    llm = LLM(path, **options)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = []
    for prompt, output in zip(prompts, llm.generate(inputs, params, use_tqdm=False), strict=True):
        entries: Any = output.prompt_logprobs
        own = [entry[token] for token, entry in zip(prompt[1:], entries[1:], strict=True)]
        scores = [(entry.logprob, entry.rank) for entry in own]
        answers.append({"tokens": output.outputs[0].token_ids, "scores": scores})
    llm.llm_engine.engine_core.shutdown()
    return answers


if __name__ == "__main__":
    main()
