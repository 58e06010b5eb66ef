"""Compare every model family with transformers; write docs/models.json and docs/models.md.

    python docs/models.py                  # all families; hours on two cores, minutes each
    python docs/models.py llama gemma2     # these; the results of the others stay

A family's tiny member (tests/checkpoint_families.py) continues prompts greedily by 64 tokens on the
emulated device in float32: each alone, a batch of mixed lengths, and prompts that hit the prefix
cache. Each family has a process of its own, so that its memory is freed. Nothing here runs an NPU.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from generate import DOCS, pages
from models_page import RESULTS, load_results

from benchmarks.runner.machine import describe_machine
from tests.checkpoint_families import FAMILIES, SIZES

NUM_TOKENS = 64
# Prompts end at four windows; this replaces the window of a family without one.
USUAL_WINDOW = 48
BLOCK_SIZE = 32
_RESULT = "RESULT"
# The last line of a traceback.
_RAISED = re.compile(r"[\w.]*(Error|Exception): ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; return 1 if a family failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default: 1)")
    parser.add_argument("--measure", metavar="FAMILY", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.measure is not None:
        result = json.dumps(measure(args.measure, args.threads))
        sys.stdout.write(f"\n{_RESULT}{result}\n")
        return 0
    unknown = [name for name in args.families if name not in FAMILIES]
    if unknown:
        parser.error(f"unknown families: {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    return _measure_all(args.families or list(FAMILIES), args.threads)


def _measure_all(names: Sequence[str], threads: int) -> int:
    machine = describe_machine()
    results = load_results()
    bad = 0
    for index, name in enumerate(names, 1):
        started = time.monotonic()
        result = _in_a_process(name, threads) | {
            "measured": datetime.now(UTC).date().isoformat(),
            "commit": machine.commit,
            "cpu": machine.cpu,
            "versions": machine.versions,
        }
        results[name] = result
        bad += not _is_equal(result)
        seconds = time.monotonic() - started
        sys.stdout.write(f"[{index}/{len(names)}] {name}: {_summary(result)} ({seconds:.0f} s)\n")
        sys.stdout.flush()
        # After every family, so an interrupted run loses only one.
        ordered = {known: results[known] for known in FAMILIES if known in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        page = DOCS / "models.md"
        page.write_text(pages()[page], encoding="utf-8")
    return 1 if bad else 0


def _in_a_process(name: str, threads: int) -> dict[str, Any]:
    # The engine core runs in the measuring process, which can then inspect it.
    settings = ["VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_PLUGINS=rbln", "HF_HUB_OFFLINE=1"]
    script = [sys.executable, __file__, "--measure", name, "--threads", str(threads)]
    done = subprocess.run(
        ["env", *settings, *script], capture_output=True, text=True, check=False, cwd=DOCS.parent
    )
    for line in done.stdout.splitlines():
        if line.startswith(_RESULT):
            result: dict[str, Any] = json.loads(line.removeprefix(_RESULT))
            return result
    raised = [line for line in done.stderr.splitlines() if _RAISED.match(line)]
    return {"error": raised[-1] if raised else f"ended with {done.returncode}"}


def _is_equal(result: Mapping[str, Any]) -> bool:
    if "error" in result:
        return False
    return all(part["equal"] == part["requests"] for part in result["parts"].values())


def _summary(result: Mapping[str, Any]) -> str:
    if "error" in result:
        return f"failed: {result['error']}"
    parts = result["parts"]
    equal = ", ".join(f"{name} {part['equal']}/{part['requests']}" for name, part in parts.items())
    worst = max(part["max_delta"] for part in parts.values())
    return f"equal outputs {equal}; largest logprob difference {worst:.1e}"


def measure(name: str, threads: int) -> dict[str, Any]:
    """Run one family in this process and compare it with transformers."""
    from tests.checkpoints import CheckpointCache

    checkpoint = CheckpointCache(Path.home() / ".cache" / "rbln-serve" / "test-checkpoints")(name)
    prompts = _prompts(checkpoint)
    # Before the engine, because vLLM wraps the transformers classes that it runs.
    expected = {part: _references(checkpoint, batch) for part, batch in prompts.items()}
    with tempfile.TemporaryDirectory(prefix="rbln-models-") as folder:
        llm = _engine(checkpoint, Path(folder), threads)
        outputs = {
            "alone": [_generate(llm, [prompt])[0] for prompt in prompts["alone"]],
            "batch": _generate(llm, prompts["batch"]),
        }
        # The prefix is computed just before, because the log of window layers is finite.
        _generate(llm, [prompt[:-3] for prompt in prompts["prefix hits"]], max_tokens=1)
        outputs["prefix hits"] = _generate(llm, prompts["prefix hits"])
        kv_caches = _kv_caches(llm)
    hits = [output.num_cached_tokens for output in outputs["prefix hits"]]
    return {
        "architecture": _read(checkpoint)["architectures"][0],
        "kv_caches": kv_caches,
        "particular": _particular(name),
        "prompt_lengths": sorted({len(prompt) for prompt in prompts["alone"]}),
        "hit_tokens": sum(hits),
        "parts": {part: _compare(outputs[part], expected[part]) for part in outputs},
    }


def _read(checkpoint: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return content


def _prompts(checkpoint: Path) -> dict[str, list[list[int]]]:
    """Return prompts of mixed lengths by part of the comparison; hits need at least a block."""
    rng = random.Random(64)
    window = _read(checkpoint).get("sliding_window") or USUAL_WINDOW
    lengths = [1, 5, window - 1, window, window + 1, 2 * window, 4 * window]

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, 500) for _ in range(count)]

    return {
        "alone": [tokens(length) for length in lengths],
        "batch": [tokens(length) for length in lengths],
        "prefix hits": [tokens(length + 3) for length in lengths if length > BLOCK_SIZE],
    }


def _references(checkpoint: Path, prompts: list[list[int]]) -> list[Any]:
    from tests.reference import reference_generate

    return [reference_generate(checkpoint, prompt, NUM_TOKENS) for prompt in prompts]


def _engine(checkpoint: Path, folder: Path, threads: int) -> Any:
    from vllm import LLM

    from tests.kernel_cache import share_kernels

    share_kernels(folder)
    rbln = {
        "cache_root": str(folder),
        "num_threads": threads,
        # Chunks shorter and longer than every window; a batch of one and of more.
        "prefill_chunk_buckets": [16, 64],
        "decode_batch_bucket_strategy": "manual",
        "decode_batch_bucket_manual_buckets": [1, 4],
    }
    return LLM(
        str(checkpoint),
        dtype="float32",
        max_model_len=4 * USUAL_WINDOW + NUM_TOKENS + BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        seed=0,
        disable_log_stats=True,
        additional_config={"rbln": rbln},
    )


def _generate(llm: Any, prompts: list[list[int]], max_tokens: int = NUM_TOKENS) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=3)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs: list[Any] = llm.generate(inputs, params, use_tqdm=False)
    return outputs


def _kv_caches(llm: Any) -> list[str]:
    from rbln_backend.worker.startup.preflight import cache_groups

    (specs,) = llm.collective_rpc("get_kv_cache_spec")
    return [f"{group.num_layers} x {group.kind}" for group in cache_groups(specs)]


def _compare(outputs: list[Any], expected: list[Any]) -> dict[str, Any]:
    """Compare tokens and log-probabilities with the reference up to the first different token."""
    deltas: list[float] = []
    equal = equal_tokens = 0
    for output, reference in zip(outputs, expected, strict=True):
        (completion,) = output.outputs
        same = _common_length(list(completion.token_ids), reference.token_ids)
        equal += same == NUM_TOKENS
        equal_tokens += same
        for position, entries in enumerate(completion.logprobs[: same + 1]):
            for token, entry in entries.items():
                deltas.append(abs(entry.logprob - float(reference.logprobs[position, token])))
    return {
        "requests": len(outputs),
        "equal": equal,
        "tokens": len(outputs) * NUM_TOKENS,
        "equal_tokens": equal_tokens,
        "max_delta": max(deltas),
        "mean_delta": sum(deltas) / len(deltas),
    }


def _common_length(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(left))


def _particular(name: str) -> str:
    """Return the features of the family's configuration besides sizes, in a few words."""
    words = []
    for field, value in FAMILIES[name].fields.items():
        if field in SIZES or field == "layer_types" or value is ... or value is None:
            continue
        if isinstance(value, Mapping):
            kinds = [str(inner) for key, inner in _flat(value) if key == "rope_type"]
            value = "/".join(kinds) or "set"
        words.append(f"{field}={value:.4g}" if isinstance(value, float) else f"{field}={value}")
    return ", ".join(words)


def _flat(mapping: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs = []
    for key, value in mapping.items():
        pairs += _flat(value) if isinstance(value, Mapping) else [(key, value)]
    return pairs


if __name__ == "__main__":
    sys.exit(main())
