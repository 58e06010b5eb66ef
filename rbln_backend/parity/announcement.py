"""Lines printed before and between the runs, as the documented runner prints them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rbln_backend.parity.job import Side
from rbln_backend.parity.options import Options

# What makes a side the one that it is.
_VARIABLES: Mapping[Side, tuple[str, ...]] = {
    "cpu": ("VLLM_PLUGINS",),
    "rbln": ("VLLM_PLUGINS", "RBLN_KERNEL_MODE", "VLLM_DISABLE_COMPILE_CACHE"),
    "transformers": (),
}


def heading(options: Options, model: str) -> str:
    """``model`` is what the name on the command line stands for."""
    return (
        f"Model = {model}, EP={options.ep}, TP={options.tp}, PP={options.pp}, DP={options.dp}, "
        f"MaxTokens={options.max_tokens}, Logprobs={options.logprobs}, "
        f"Prompts={len(options.prompts)}"
    )


def launch(side: Side, environ: Mapping[str, str]) -> Iterator[str]:
    """The lines before a side starts in ``environ``."""
    yield f"\n[main] Launching {side.upper()} worker…"
    for name in _VARIABLES[side]:
        yield f"[{side}] {name} = {environ.get(name, '<unset>')}"
