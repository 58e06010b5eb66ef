"""Hugging Face transformers' ``generate`` in its own process, behind engine_worker's protocol.

``python -m benchmarks transformers_worker '{"model": PATH, "threads": 2}'``. Prompts of one command
have one length, so nothing is padded; the cache is the library's default. A step ends when the
library asks whether to stop, which it does once per token of the batch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.engines.worker_protocol import answers_to_parent, timed_answer


class _Clock(StoppingCriteria):
    """Criterion that records the time of each token and stops at the end of the budget."""

    def __init__(self, budget_seconds: float) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []
        self._budget_seconds = budget_seconds

    def __call__(
        self,
        input_ids: torch.LongTensor,
        scores: torch.FloatTensor,  # noqa: ARG002 - the library's signature
        **kwargs: Any,  # noqa: ARG002 - the library's signature
    ) -> torch.BoolTensor:
        self.times.append(time.perf_counter() - self.started)
        late = self.times[-1] > self._budget_seconds
        return torch.full((input_ids.shape[0],), late)  # type: ignore[return-value]


def main() -> None:
    """Load the model that the first argument names and serve commands until end of input."""
    with answers_to_parent() as answers:
        settings = json.loads(sys.argv[1])
        started = time.perf_counter()
        torch.set_num_threads(settings["threads"])
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
        model.eval()
        answers.send(
            {
                "platform": "transformers",
                "attention": model.config._attn_implementation,
                "threads": torch.get_num_threads(),
                "startup_seconds": time.perf_counter() - started,
            }
        )
        for command in answers.commands():
            answers.send(_generate(model, command))


@torch.inference_mode()
def _generate(model: Any, command: dict[str, Any]) -> dict[str, Any]:
    prompts, output_tokens = command["prompts"], command["output_tokens"]
    clock = _Clock(command["budget_seconds"])
    inputs = torch.tensor(prompts)
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=output_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    tokens = output[:, inputs.shape[1] :].tolist()
    rows = list(range(len(prompts)))
    return timed_answer([(time, rows) for time in clock.times], tokens)


if __name__ == "__main__":
    main()
