"""Command line of the parity runner, with the documented names and defaults."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HUB_NAMES = {
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen1.5-moe-15b": "Qwen/Qwen1.5-MoE-A2.7B",
    "qwen3-moe-30b": "Qwen/Qwen3-30B-A3B",
    "qwen3-moe-235b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2-Lite",
    "llama4-maverick": "meta-llama/Llama-4-Maverick-17B-128E",
}
"""Short model names of the documented parity runner."""
DEFAULT_PROMPTS = (
    "Hello, my name is",
    "The three primary colours are",
    "Explain in simple words why the sky is blue.",
    "A list of things to pack for a journey:",
)
# Least |difference of log-probabilities| of an outlier.
OUTLIER_EPS = 0.5

Reference = Literal["cpu", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a passing comparison; see ``verdict``."""

    eps: float
    min_pearson: float
    max_mean_delta: float
    max_outlier_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one run, named like the flags."""

    model: str
    tp: int
    pp: int
    dp: int
    ep: bool
    batch: int
    max_tokens: int
    max_batched: int
    max_model_len: int
    num_hidden_layers: int | None
    prompts: tuple[str, ...]
    logprobs: int
    max_logprobs_cap: int
    inspect_logits: bool
    topk: int
    block_size_cpu: int
    block_size_rbln: int
    use_cache: bool
    profile: bool
    color: bool
    snippet: bool
    snippet_elems: int
    trust_remote_code: bool
    dtype: str
    lora: str | None
    reference: Reference
    transformers: bool
    bisect: bool
    rbln_args: dict[str, Any]
    limits: Limits
    json: Path | None
    timeout: float


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; exits with status 2 and a message if it is invalid."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    if rest:
        parser.error(_unknown(parser, rest))
    given = vars(known)
    try:
        return _options(given)
    except ValueError as error:
        parser.error(str(error))


def _unknown(parser: argparse.ArgumentParser, rest: Sequence[str]) -> str:
    """Return what is wrong with the arguments left over: the first flag, and the nearest known."""
    word = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(word, flags, n=1)
    return f"unknown argument {word}" + (f"; did you mean {near[0]}?" if near else "")


def _options(given: dict[str, Any]) -> Options:
    count, prompts = given.pop("num_prompts"), given.pop("prompts")
    # Every rank needs a prompt to be compared.
    by_default = max(1, given["dp"])
    names = ("eps", "min_pearson", "max_mean_delta", "max_outlier_share")
    limits = Limits(**{name: given.pop(name) for name in names})
    options = Options(prompts=_take(prompts, count, by_default), limits=limits, **given)
    if options.logprobs < -1:
        raise ValueError("--logprobs must be -1 (all), 0 (off) or a number of tokens")
    if options.bisect and options.tp * options.pp * options.dp > 1:
        raise ValueError("--bisect reads one rank's layers: use it with --tp 1 --pp 1 --dp 1")
    if options.dp > len(options.prompts):
        raise ValueError(
            f"--dp is {options.dp}, but there are {len(options.prompts)} prompts: a rank without "
            "one would not be compared"
        )
    return options


def _take(prompts: Sequence[str] | None, count: int | None, by_default: int) -> tuple[str, ...]:
    """Return ``prompts`` cut to ``count``, or the default prompts repeated up to it."""
    if prompts:
        return tuple(prompts[:count])
    count = by_default if count is None else count
    return tuple(DEFAULT_PROMPTS[index % len(DEFAULT_PROMPTS)] for index in range(count))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rbln-parity",
        description="Run the same prompts on a reference and on the RBLN path, and compare.",
        epilog="Exit status: 0 within the limits, 1 outside of them, 2 wrong arguments, 3 a side "
        "could not run.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("model").add_argument
    names = ", ".join(HUB_NAMES)
    add("--model", default="llama3.2-1b", help=f"a path, a hub id or: {names}")
    add("--num-hidden-layers", type=_positive, help="keep only the first N layers")
    add("--dtype", default="auto", help="of both sides (default: the model's)")
    add("--lora", metavar="PATH", help="a PEFT adapter that both sides use")
    add("--trust-remote-code", action="store_true")
    add = parser.add_argument_group("prompts").add_argument
    add("--prompts", nargs="+", metavar="TEXT")
    add(
        "--num-prompts",
        type=_positive,
        help="cut --prompts, or repeat the default ones (default: one per --dp rank)",
    )
    add("--max-tokens", type=_positive, default=256)

    add = parser.add_argument_group("engines").add_argument
    for name in ("tp", "pp", "dp"):
        add(f"--{name}", type=_positive, default=1, help="ranks of the RBLN side")
    add("--ep", action="store_true", help="expert parallelism on the RBLN side")
    add("--batch", type=_positive, default=1, help="concurrent requests (per --dp rank)")
    add("--max-batched", type=_positive, default=128, help="tokens of a prefill chunk")
    add("--max-model-len", type=_positive, default=40960)
    add("--block-size-cpu", type=_positive, default=128)
    # The documents use short forms, which argparse would find ambiguous.
    add("--block-size-rbln", "--block-size", "--block", type=_positive, default=8192)
    add(
        "--rbln-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="more engine arguments of the RBLN side",
    )
    add("--profile", action="store_true", help="write ./profile/<side>_<model>")
    add("--timeout", type=float, default=7200.0, help="limit of a side in seconds")

    add = parser.add_argument_group("comparison").add_argument
    add("--reference", choices=("cpu", "transformers"), default="cpu")
    add(
        "--transformers", action="store_true", help="also compare both with transformers in float32"
    )
    add("--bisect", action="store_true", help="find the first layer that departs")
    add("--logprobs", type=int, default=1024, help="0 off, N top N, -1 all")
    add("--max-logprobs-cap", type=_positive, default=128256)
    add("--eps", type=float, default=OUTLIER_EPS, help="|delta| of an outlier")
    add("--min-pearson", type=float, default=0.99)
    add("--max-mean-delta", type=float, default=0.1)
    add("--max-outlier-share", type=float, default=0.01)
    add("--use-cache", action="store_true", help="keep the references' results in ./cache")

    add = parser.add_argument_group("report").add_argument
    add("--inspect-logits", action=argparse.BooleanOptionalAction, default=True)
    add("--topk", type=_positive, default=5, help="rows of the top-k table")
    add("--no-color", dest="color", action="store_false")
    add("--no-snippet", dest="snippet", action="store_false")
    add("--snippet-elems", type=int, default=6)
    add("--json", type=Path, metavar="FILE", help="write the report as JSON lines")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
