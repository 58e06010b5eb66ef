"""Settings of a test: environment variables, because the double runs in other processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# A CR13 has 140 GiB (vllm_rbln/v1/worker/utils.py, REBEL_DRAM_NBYTES).
_CR13_BYTES = 140 << 30


@dataclass(frozen=True)
class Settings:
    """``SDK_DOUBLE_*``, read once."""

    log: Path | None
    npu: str | None
    devices: int
    off: frozenset[str]
    broken: frozenset[str]
    compile_seconds: float
    memory: int
    holds_outputs: bool
    version: str

    @property
    def is_next(self) -> bool:
        """Of release 0.12.1, as vllm_rbln 0.12.1a8 calls it."""
        return self.version.startswith("0.12.1")


def _words(name: str) -> frozenset[str]:
    return frozenset(word for word in os.environ.get(name, "").split(",") if word)


def read_settings() -> Settings:
    """The settings of this process.

    ``SDK_DOUBLE_LOG`` file to append to; ``SDK_DOUBLE_NPU`` name of every NPU, empty for a host
    without one; ``SDK_DOUBLE_DEVICES`` how many there are; ``SDK_DOUBLE_OFF`` rules switched off;
    ``SDK_DOUBLE_BREAK`` what is done wrong on purpose (``kv_copy``, ``argmax``, ``draft_rows``,
    ``cache_dtype``, ``scales``, ``nibbles``; ``hidden_states``: inputs of this name are zeros;
    ``operands``: matrices that a graph multiplies by stay what they were when it was compiled);
    ``SDK_DOUBLE_COMPILE_S`` seconds a compile takes; ``SDK_DOUBLE_MEMORY`` bytes of one device;
    ``SDK_DOUBLE_HOLD`` 1 keeps the outputs of a run back until they are read;
    ``SDK_DOUBLE_VERSION`` 0.12.0 or 0.12.1, whose ops have further arguments.
    """
    log = os.environ.get("SDK_DOUBLE_LOG")
    return Settings(
        log=Path(log) if log else None,
        npu=os.environ.get("SDK_DOUBLE_NPU", "RBLN-CR13") or None,
        devices=int(os.environ.get("SDK_DOUBLE_DEVICES", "4")),
        off=_words("SDK_DOUBLE_OFF"),
        broken=_words("SDK_DOUBLE_BREAK"),
        compile_seconds=float(os.environ.get("SDK_DOUBLE_COMPILE_S", "0")),
        memory=int(os.environ.get("SDK_DOUBLE_MEMORY", str(_CR13_BYTES))),
        holds_outputs=os.environ.get("SDK_DOUBLE_HOLD", "0") == "1",
        version=os.environ.get("SDK_DOUBLE_VERSION", "0.12.0"),
    )


SETTINGS = read_settings()
