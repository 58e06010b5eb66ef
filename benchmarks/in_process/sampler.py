"""The sampler against vLLM's: milliseconds for a step's tokens, by parameter, batch and vocabulary.

    python -m benchmarks sampler [--threads N] [--batch 1 8] [--vocabulary 32000 128256]

Logits are bfloat16, as of a model with random weights; the two sides alternate, and each figure is
the best of its passes. vLLM's code runs with as many threads as the kernels.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from rbln_backend.emulator.kernel_set import load_kernels, set_threads
from rbln_backend.worker.sampling.kernel_sampler import KernelSampler

_PASSES = 12
_PROMPT, _OUTPUT = 200, 200
# By name: temperature, and what else a request has.
_CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "seed": {"seed": True},
    "repetition penalty": {"temperature": 0.0, "repetition": 1.1},
    "penalties": {"temperature": 0.0, "presence": 0.5, "frequency": 0.5},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


def metadata_of(rows: int, vocabulary: int, case: dict[str, Any]) -> SamplingMetadata:
    """Return the metadata of ``rows`` equal requests."""

    def column(name: str, default: float = 0.0) -> Tensor:
        return torch.full((rows,), float(case.get(name, default)))

    is_greedy = case.get("temperature") == 0.0
    has_penalties = not {"repetition", "presence"}.isdisjoint(case)
    return SamplingMetadata(
        temperature=None if is_greedy else column("temperature", 1.0),
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=column("top_p") if "top_p" in case else None,
        top_k=column("top_k").int() if "top_k" in case else None,
        generators={row: torch.Generator().manual_seed(row) for row in range(rows)}
        if "seed" in case
        else {},
        max_num_logprobs=case.get("logprobs"),
        no_penalties=not has_penalties,
        prompt_token_ids=torch.randint(0, vocabulary, (rows, _PROMPT)) if has_penalties else None,
        frequency_penalties=column("frequency"),
        presence_penalties=column("presence"),
        repetition_penalties=column("repetition", 1.0),
        output_token_ids=torch.randint(0, vocabulary, (rows, _OUTPUT)).tolist(),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def best_ms(rows: int, vocabulary: int, case: dict[str, Any], threads: int) -> tuple[float, float]:
    """Return milliseconds of our sampler and of vLLM's."""
    logits = torch.randn(rows, vocabulary).bfloat16()
    metadata = metadata_of(rows, vocabulary, case)
    best = [math.inf, math.inf]
    samplers = (KernelSampler(), Sampler())
    for _ in range(_PASSES):
        for side, sampler in enumerate(samplers):
            torch.set_num_threads(threads if side else 1)
            # vLLM's code may change its input.
            own = logits.clone()
            begin = time.perf_counter()
            sampler(logits=own, sampling_metadata=metadata)
            best[side] = min(best[side], time.perf_counter() - begin)
    return best[0] * 1e3, best[1] * 1e3


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks sampler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--cache-root", type=Path, default=Path.home() / ".cache" / "vllm")
    options = parser.parse_args(argv)
    kernels = load_kernels(options.cache_root, "native")
    set_threads(options.threads)
    print(f"{kernels.isa} kernels, {options.threads} threads; ms, ours and (vLLM's)\n")
    shapes = [(rows, width) for width in options.vocabulary for rows in options.batch]
    print("| | " + " | ".join(f"{rows} x {width:,}" for rows, width in shapes) + " |")
    print("|---" * (1 + len(shapes)) + "|")
    for name, case in _CASES.items():
        pairs = [best_ms(rows, width, case, options.threads) for rows, width in shapes]
        cells = (f"{ours:.3f} ({theirs:.2f})" for ours, theirs in pairs)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return 0
