"""An engine in a process of its own, run by either Python: theirs, and ours for comparison.

The argument is ``[checkpoint, options of LLM, rounds of prompts, number of tokens]``; a round is
answered before the next begins. The result is the tokens of every prompt, greedily.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(checkpoint: str, options: Any, rounds: list[list[list[int]]], num_tokens: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(checkpoint, **options)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    answers = []
    for prompts in rounds:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    sys.stdout.write(f"RESULT {json.dumps(answers)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
