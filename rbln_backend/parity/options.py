"""The command line of the parity runner. The documented options keep their names and defaults."""

from __future__ import annotations

import argparse
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
"""The short model names of the documented parity runner."""
DEFAULT_PROMPTS = (
    "Hello, my name is",
    "The three primary colours are",
    "Explain in simple words why the sky is blue.",
    "A list of things to pack for a journey:",
)
# |difference of log-probabilities| from which a token counts as an outlier.
OUTLIER_EPS = 0.5
_AT_LEAST_ONE = (
    *("tp", "pp", "dp", "batch", "max_tokens", "max_batched", "max_model_len", "topk"),
    *("max_logprobs_cap", "block_size_cpu", "block_size_rbln"),
)

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
    """One run; field names are those of the flags."""

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
    cache_dir: Path
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
    junit: Path | None
    html: Path | None
    timeout: float


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; exits with status 2 and a message where it is wrong."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    try:
        return _options(given)
    except ValueError as error:
        parser.error(str(error))


def _options(given: dict[str, Any]) -> Options:
    count, prompts = given.pop("num_prompts"), given.pop("prompts")
    # A rank without a prompt would not be compared.
    by_default = max(1, given["dp"])
    names = ("eps", "min_pearson", "max_mean_delta", "max_outlier_share")
    limits = Limits(**{name: given.pop(name) for name in names})
    options = Options(prompts=_take(prompts, count, by_default), limits=limits, **given)
    for name in _AT_LEAST_ONE:
        if getattr(options, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}, and must be at least 1"
            )
    if options.num_hidden_layers is not None and options.num_hidden_layers < 1:
        raise ValueError(
            f"--num-hidden-layers is {options.num_hidden_layers}, and must be at least 1"
        )
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
    """An explicit list is cut to ``count``; the default prompts are repeated up to it."""
    if count is not None and count < 1:
        raise ValueError(f"--num-prompts is {count}, and must be at least 1")
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
    _model_arguments(parser)
    _engine_arguments(parser)
    _comparison_arguments(parser)
    _report_arguments(parser)
    return parser


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    names = ", ".join(HUB_NAMES)
    group.add_argument("--model", default="llama3.2-1b", help=f"a path, a hub id or: {names}")
    group.add_argument("--num-hidden-layers", type=int, help="keep only the first N layers")
    group.add_argument("--dtype", default="auto", help="of both sides (default: the model's)")
    group.add_argument("--lora", metavar="PATH", help="a PEFT adapter that both sides use")
    group.add_argument("--trust-remote-code", action="store_true")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompts", nargs="+", metavar="TEXT")
    prompts.add_argument(
        "--num-prompts",
        type=int,
        help="cut --prompts, or repeat four of ours (default: one, with --dp one a rank)",
    )
    prompts.add_argument("--max-tokens", type=int, default=256)


def _engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    for name in ("tp", "pp", "dp"):
        group.add_argument(f"--{name}", type=int, default=1, help="ranks of the RBLN side")
    group.add_argument("--ep", action="store_true", help="expert parallelism on the RBLN side")
    group.add_argument("--batch", type=int, default=1, help="requests at once (of each --dp rank)")
    group.add_argument("--max-batched", type=int, default=128, help="tokens of a prefill chunk")
    group.add_argument("--max-model-len", type=int, default=40960)
    group.add_argument("--block-size-cpu", type=int, default=128)
    # The documents shorten it; argparse would find two options that begin so.
    group.add_argument("--block-size-rbln", "--block-size", "--block", type=int, default=8192)
    group.add_argument(
        "--rbln-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="more engine arguments of the RBLN side",
    )
    group.add_argument("--profile", action="store_true", help="write ./profile/<side>_<model>")
    group.add_argument("--timeout", type=float, default=7200.0, help="seconds a side may take")


def _comparison_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison")
    group.add_argument("--reference", choices=("cpu", "transformers"), default="cpu")
    group.add_argument(
        "--transformers", action="store_true", help="compare both with transformers in float32, too"
    )
    group.add_argument("--bisect", action="store_true", help="find the first layer that departs")
    group.add_argument("--logprobs", type=int, default=1024, help="0 off, N top N, -1 all")
    group.add_argument("--max-logprobs-cap", type=int, default=128256)
    group.add_argument("--eps", type=float, default=OUTLIER_EPS, help="|delta| of an outlier")
    group.add_argument("--min-pearson", type=float, default=0.99)
    group.add_argument("--max-mean-delta", type=float, default=0.1)
    group.add_argument("--max-outlier-share", type=float, default=0.01)
    group.add_argument("--use-cache", action="store_true", help="reuse the references' results")
    group.add_argument("--cache-dir", type=Path, default=Path("cache"))


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--inspect-logits", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--topk", type=int, default=5, help="rows of the top-k table")
    group.add_argument("--no-color", dest="color", action="store_false")
    group.add_argument("--no-snippet", dest="snippet", action="store_false")
    group.add_argument("--snippet-elems", type=int, default=6)
    for kind in ("json", "junit", "html"):
        group.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write a {kind} report")


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
