"""Run in a process of its own: an engine over the SDK's double, several prompts, one after another.

Its argument is JSON: the model's path, the options of ``LLM``, and batches of prompts (token ids).
It prints the greedy tokens of every batch behind ``RESULT``.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Answer each batch before the next is sent, so that later ones meet what earlier ones left."""
    from vllm import LLM, SamplingParams

    path, options, batches, max_tokens = json.loads(sys.argv[1])
    llm = LLM(path, **options)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    answers: list[list[Any]] = []
    for batch in batches:
        prompts = [{"prompt_token_ids": prompt} for prompt in batch]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    print("RESULT", json.dumps(answers))


if __name__ == "__main__":
    main()
