"""Run in a process of its own: KV that leaves an NPU and comes back, over the SDK's double.

Its argument is JSON: ``path`` of the model, ``options`` of ``LLM``, ``prompts`` (token ids),
``max_tokens``, and ``folder``, where pages are kept over a restart; without one, two engines
exchange blocks by NIXL. It prints the tokens of both rounds and, behind them, what was cached in
each prompt of the second, or the bytes that each round transferred.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any


def main() -> None:
    job = json.loads(sys.argv[1])
    from vllm import SamplingParams

    from rbln_backend.vllm_patches import inspect_models_here

    inspect_models_here()
    folder = job.pop("folder")
    params = {"temperature": 0.0, "max_tokens": job.pop("max_tokens"), "ignore_eos": True}
    answer = _restarted if folder else _transferred
    answers = answer(job, folder, lambda **more: SamplingParams(**params | more))
    sys.stdout.write(f"RESULT {json.dumps(answers)}\n")


def _engine(job: dict[str, Any], connector: str, role: str, **extra: Any) -> Any:
    from vllm import LLM, envs

    from tests.ports import free_port

    envs.disable_envs_cache()
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    transfer = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
    return LLM(job["path"], kv_transfer_config=transfer, **job["options"])


def _generate(llm: Any, prompts: list[list[int]], params: Any) -> Any:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def _tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def _restarted(job: dict[str, Any], folder: str, sampling: Any) -> list[Any]:
    """Return both rounds' tokens, of an engine and of its successor, and the cached tokens."""
    extra = {"secondary_tiers": [{"type": "fs", "root_dir": folder}]}
    rounds: list[Any] = []
    cached: list[int] = []
    for _ in range(2):
        llm = _engine(job, "OffloadingConnector", "kv_both", **extra)
        outputs = _generate(llm, job["prompts"], sampling())
        rounds.append(_tokens(outputs))
        cached = [output.num_cached_tokens for output in outputs]
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    return [*rounds, cached]


def _transferred(job: dict[str, Any], _: str | None, sampling: Any) -> list[Any]:
    """Return both rounds' tokens, of a decode engine, and the bytes that each round read."""
    prefill = _engine(job, "NixlConnector", "kv_producer")
    decode = _engine(job, "NixlConnector", "kv_consumer")
    worker = decode.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    stats = worker._transfer.connector.connector_worker.xfer_stats
    read: list[int] = []
    record = stats.record_transfer

    def note(result: Any) -> None:
        read[-1] += result.totalBytes
        record(result)

    stats.record_transfer = note
    rounds: list[Any] = []
    for_transfer = {"kv_transfer_params": {"do_remote_decode": True}}
    for _ in range(2):
        read.append(0)
        offers = [
            output.kv_transfer_params
            for output in _generate(
                prefill, job["prompts"], sampling(max_tokens=1, extra_args=for_transfer)
            )
        ]
        params = [sampling(extra_args={"kv_transfer_params": offer}) for offer in offers]
        rounds.append(_tokens(_generate(decode, job["prompts"], params)))
    for llm in (prefill, decode):
        llm.llm_engine.engine_core.shutdown()
    return [*rounds, read]


if __name__ == "__main__":
    main()
