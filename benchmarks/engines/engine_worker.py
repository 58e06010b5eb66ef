"""One engine of a measurement, in its own process: reads JSON commands, answers in JSON lines.

``python -m benchmarks.engines.engine_worker '<keyword arguments of vllm.LLM as JSON>'``.
VLLM_PLUGINS selects the platform. The first answer describes the engine, once it is ready. Then
every line of standard input is a command,
answered by one line, as worker_protocol says.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from benchmarks.engines.worker_protocol import answers_to_parent, timed_answer
from rbln_backend.host.resources import vllm_build

if TYPE_CHECKING:
    from vllm import LLM


def main() -> None:
    """Start the engine that the first argument describes and serve commands until end of input."""
    with answers_to_parent() as answers:
        started = time.perf_counter()
        from vllm import LLM

        llm = LLM(**json.loads(sys.argv[1]))
        answers.send(_describe(llm) | {"startup_seconds": time.perf_counter() - started})
        for command in answers.commands():
            answers.send(_generate(llm, command))


def _describe(llm: LLM) -> dict[str, Any]:
    from vllm.platforms import current_platform

    config = llm.llm_engine.vllm_config
    return {
        "platform": type(current_platform).__name__,
        "engine_core": type(llm.llm_engine.engine_core).__name__,
        "executor": str(config.parallel_config.distributed_executor_backend),
        "compilation_mode": config.compilation_config.mode.name,
        "dtype": str(config.model_config.dtype),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "block_size": config.cache_config.block_size,
        "vllm": str(vllm_build()),
        "torch": version("torch"),
    }


def _generate(llm: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """Answer as in worker_protocol; abort unfinished requests at the end of the budget."""
    from vllm import RequestOutput, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=command["output_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine, prompts = llm.llm_engine, command["prompts"]
    indices = {uuid4().hex: index for index in range(len(prompts))}
    tokens: list[list[int]] = [[] for _ in prompts]
    events: list[tuple[float, list[int]]] = []
    started = time.perf_counter()
    for name, index in indices.items():
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompts[index]), sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        clock = time.perf_counter() - started
        given = []
        for output in outputs:
            assert isinstance(output, RequestOutput)
            if new := list(output.outputs[0].token_ids):
                given.append(indices[output.request_id])
                tokens[given[-1]] += new
        if given:
            events.append((clock, given))
        if clock > command["budget_seconds"]:
            engine.abort_request(list(indices))
    return timed_answer(events, tokens)


if __name__ == "__main__":
    main()
