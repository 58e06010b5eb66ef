"""Run in a process of its own: pooling engines over the SDK's double, one after another.

Its argument is a JSON list of jobs: the model's path, the options of ``LLM``, vLLM's name of the
task, and batches of prompts (token ids). It prints the vectors of every job's batches behind
``RESULT``.
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


def _answer(path: str, options: dict[str, Any], task: Any, batches: list[list[list[int]]]) -> Any:
    from vllm import LLM

    from rbln_backend.vllm_patches import inspect_models_here

    inspect_models_here()
    llm = LLM(path, runner="pooling", **options)
    answers = [
        [
            output.outputs.data.tolist()
            for output in llm.encode(
                [{"prompt_token_ids": prompt} for prompt in batch],
                pooling_task=task,
                use_tqdm=False,
            )
        ]
        for batch in batches
    ]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return answers


if __name__ == "__main__":
    main()
