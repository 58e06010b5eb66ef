"""Attention of the last chunk of a prompt of 7,000 tokens, of the machine's limit."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from benchmarks.models.shapes import find_checkpoint
from benchmarks.runner.machine import ChildMeter
from benchmarks.scenarios.bench import Bench, Sample

MODELS = ("160m",)
SIDES = ("ours",)
MINUTES = 1
_PROMPT, _CHUNK = 7000, 256


def run(bench: Bench) -> None:
    """Fill the figures; ours runs in this process, with all threads."""
    for model in bench.models:
        checkpoint = find_checkpoint(model).path
        for number in range(bench.rounds):
            bench.check_time()
            bench.take(model, "ours", number, partial(_attention, checkpoint))


def _attention(checkpoint: Path, _attempt: int) -> Sample:
    import torch

    from benchmarks.in_process.kernels import CACHE_ROOT, attention_case, best_seconds
    from benchmarks.runner.limits import measure_limits
    from rbln_backend.devices.emulated.kernel_set import load_kernels, set_threads

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    heads = config["num_key_value_heads"]
    shape = (heads, config["num_attention_heads"] // heads, config["head_dim"])
    load_kernels(CACHE_ROOT, "native")
    set_threads(len(os.sched_getaffinity(0)))
    meter = ChildMeter()
    with torch.inference_mode():
        case = attention_case(torch.bfloat16, 1, *shape, _PROMPT - _CHUNK, _CHUNK)
        seconds = best_seconds(case.ours)
    busy = meter.other_busy_cores()
    share = measure_limits(case.moved).seconds(case.moved, case.flops) / seconds
    return Sample({"attention of a chunk over 7,000 tokens, of the limit": (share, "%")}, busy)
