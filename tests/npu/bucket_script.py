"""Run in a process of its own: an engine over the SDK's double whose sizes change as it answers.

Its argument is a JSON object: the model's path, the options of ``LLM``, the prompts (token ids),
the changes (``decode`` and ``prefill``), and how many tokens to answer with. Behind ``RESULT`` it
prints the process's number, the last report of each change, the graphs held after each release,
and the tokens of each answered prompt by its number. Prompts come one by one, over and over, until
all changes are done.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from typing import Any


def main() -> None:
    """As `_Changing`, with the argument's fields."""
    from rbln_backend.vllm_compat.patches import inspect_models_here

    inspect_models_here()
    result = _Changing(**json.loads(sys.argv[1])).run()
    sys.stdout.write(f"RESULT {json.dumps({'pid': os.getpid(), **result})}\n")


class _Changing:
    def __init__(
        self,
        path: str,
        options: dict[str, Any],
        prompts: list[list[int]],
        changes: list[dict[str, list[int]]],
        max_tokens: int,
    ) -> None:
        from vllm import LLM, SamplingParams

        self._engine: Any = LLM(path, **options).llm_engine
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._prompts, self._changes = prompts, changes
        self._numbers = count()
        self._answers: list[tuple[int, list[int]]] = []

    def run(self) -> dict[str, Any]:
        reports, held, state = [], [], {}
        for sizes in self._changes:
            reports.append(self._change(sizes))
            for _ in range(20):
                self._step()
            self._call("release_graphs")
            state = self._call("bucket_state")
            held.append(state["graphs"])
        while self._engine.has_unfinished_requests():
            self._take(self._engine.step())
        self._engine.engine_core.shutdown()
        return {"reports": reports, "held": held, "state": state, "answers": self._answers}

    def _change(self, sizes: dict[str, list[int]]) -> dict[str, Any]:
        report = self._call("start_bucket_change", sizes["decode"], sizes["prefill"])
        while report["phase"] not in ("done", "failed"):
            self._step()
            # As the server does: the process that compiles has the lowest priority.
            time.sleep(0.02)
            report = self._call("advance_bucket_change", report["phase"])
        return report

    def _call(self, method: str, *arguments: Any) -> Any:
        core = self._engine.engine_core.engine_core
        return core.collective_rpc(method, args=arguments)[0]

    def _step(self) -> None:
        if self._engine.get_num_unfinished_requests() < 1 + len(self._answers) % 4:
            number = next(self._numbers)
            prompt = {"prompt_token_ids": self._prompts[number % len(self._prompts)]}
            self._engine.add_request(str(number), prompt, self._params)
        self._take(self._engine.step())

    def _take(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finished:
                number = int(output.request_id) % len(self._prompts)
                self._answers.append((number, list(output.outputs[0].token_ids)))


if __name__ == "__main__":
    main()
