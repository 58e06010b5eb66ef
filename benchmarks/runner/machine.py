"""Machine of a measurement: processor, bandwidth, FLOP/s, software versions, least time of a step.

The least time is a step's work over the measured limits. Only unavoidable work counts: weights,
keys and values once, and the model's multiplications. Padding, activations and other work of an
implementation do not.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Self

from rbln_backend.host.resources import vllm_build

# The instruction sets that select kernels of any side.
_RELEVANT_FLAGS = (
    "avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_bf16"
).split()
_LSCPU_FIELDS = (
    "Model name",
    "CPU family",
    "Model",
    "CPU(s)",
    "Thread(s) per core",
    "L2 cache",
    "L3 cache",
    "Hypervisor vendor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and software of one run; `cores` are those of this process's affinity."""

    cpu: str
    lscpu: dict[str, str]
    flags: list[str]
    cores: int
    memory_bytes: int
    kernel: str
    versions: dict[str, str]
    commit: str

    @property
    def slug(self) -> str:
        """Return a file-name part such as ``amd-epyc-2core-avx2``."""
        words = "".join(c if c.isalnum() else " " for c in self.cpu.lower()).split()
        known = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
        widest = next((flag for flag in known if flag in self.flags), "x86")
        return "-".join([*words, f"{self.cores}core", widest.replace("_", "-")])


def describe_machine() -> Machine:
    """Read /proc, lscpu, the installed packages and git."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = _field(cpuinfo, "flags").split()
    lscpu = _output(["lscpu"])
    return Machine(
        cpu=_field(cpuinfo, "model name"),
        lscpu={name: value for name in _LSCPU_FIELDS if (value := _field(lscpu, name))},
        flags=[flag for flag in _RELEVANT_FLAGS if flag in flags],
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("rbln-serve", "torch", "transformers")}
        | {(build := vllm_build()).distribution: build.version},
        commit=_commit(),
    )


def read_bandwidth(size: int) -> float:
    """Return the bytes per second at which all cores together read a buffer of `size` bytes.

    The best pass of 0.8 seconds, in huge pages, with and without fetches ahead. A buffer that fits
    in the last-level cache gives that cache's bandwidth, as weights of that size would.
    """
    return _probe(len(os.sched_getaffinity(0)), "read", str(size))


def fma_peak(threads: int) -> float:
    """Return the FLOP/s of independent float32 FMAs on `threads` cores."""
    return _probe(threads, "fma")


def pair_peak(threads: int) -> float | None:
    """Return the FLOP/s of AVX-512's products of bfloat16 pairs, or None without them."""
    return _probe(threads, "pairs") or None


def _probe(threads: int, *words: str) -> float:
    command = ["env", f"OMP_NUM_THREADS={threads}", str(_probe_program()), *words]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@cache
def _probe_program() -> Path:
    """Build probe.c, which takes a second, for the lifetime of this process."""
    folder = tempfile.TemporaryDirectory(prefix="rbln-probe-")
    atexit.register(folder.cleanup)
    program = Path(folder.name) / "probe"
    flags = ["-O2", "-march=native", "-ffp-contract=fast", "-fopenmp", "-w"]
    source = Path(__file__).with_name("probe.c")
    subprocess.run(["gcc", *flags, str(source), "-o", str(program)], check=True)
    return program


class ChildMeter:
    """Busy cores of other processes while this one runs children, from construction on."""

    def __init__(self) -> None:
        self._began, self._all, self._own = time.perf_counter(), busy_cpu_seconds(), _own()

    def seconds(self) -> float:
        """Return the seconds since construction."""
        return time.perf_counter() - self._began

    def other_busy_cores(self, living: float = 0.0) -> float:
        """Return the cores that others kept busy; `living` is the CPU time of living children."""
        others = busy_cpu_seconds() - self._all - (_own() - self._own) - living
        return max(0.0, others) / self.seconds()


def _own() -> float:
    """Return the CPU time of this process and its ended children."""
    return sum(os.times()[:4])


def busy_cpu_seconds() -> float:
    """Return the CPU time that all processes together have used since boot, over all cores."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(ticks) for ticks in fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def group_cpu_seconds(group: int) -> float:
    """Return the CPU time that the living processes of process group `group` have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name comes in parentheses and may contain anything, blanks included.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _commit() -> str:
    here = ["git", "-C", str(Path(__file__).parent)]
    commit = _output([*here, "rev-parse", "--short=12", "HEAD"])
    changed = _output([*here, "status", "--porcelain", "--untracked-files=no"])
    return (commit or "unknown") + (" with local changes" if changed else "")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


_BYTES_PER_ELEMENT = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of all threads of this machine together."""

    bytes_per_s: float
    flops_per_s: float
    unit: str = "FMA"  # "FMA" of float32, or "pairs" of bfloat16

    def seconds(self, moved: int, flops: int) -> float:
        """Return the least time to read `moved` bytes and do `flops` operations."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read and floating-point operations (a multiply-add is two)."""

    moved: int
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Least bytes and FLOPs of the steps of a dense decoder with full attention, in bfloat16.

    `layer_weights` counts the elements of all layers' matrices, `head_weights` those of the LM
    head; embedding rows are too few to count.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_weights: int
    head_weights: int
    key_value_weights: int = 0
    """Elements of one layer's matrices of keys and values; 0 in results that did not count them."""

    @classmethod
    def of(cls, checkpoint: Path) -> Self:
        """Read the shape of a Llama or Mistral checkpoint; raises KeyError if it is another's."""
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config["num_key_value_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
        return cls(
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layer_weights=config["num_hidden_layers"]
            * (attention + 3 * hidden * config["intermediate_size"]),
            head_weights=hidden * config["vocab_size"],
            key_value_weights=2 * hidden * kv_heads * head_dim,
        )

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that every decode step reads."""
        return (self.layer_weights + self.head_weights) * _BYTES_PER_ELEMENT

    def decode_step(self, batch: int, context: float) -> Work:
        """Return the work of one token for each of `batch` requests of `context` tokens each."""
        cached = 2 * self.layers * self.kv_heads * self.head_dim * context
        pairs = self.layers * self.heads * self.head_dim * context
        return Work(
            moved=self.weight_bytes + int(batch * cached) * _BYTES_PER_ELEMENT,
            flops=batch * (2 * (self.layer_weights + self.head_weights) + int(4 * pairs)),
        )

    def prefill(self, tokens: int) -> Work:
        """Return the work of one prompt of `tokens` tokens, its first output token included.

        Of the last layer all tokens need keys and values, and only the last one the rest.
        """
        layer = self.layer_weights // self.layers
        last = tokens * self.key_value_weights + layer - self.key_value_weights
        weights = tokens * (self.layer_weights - layer) + last + self.head_weights
        pairs = (self.layers - 1) * tokens * (tokens + 1) // 2 + tokens
        return Work(
            moved=self.weight_bytes,
            flops=2 * weights + 4 * self.heads * self.head_dim * pairs,
        )


def measure_limits(weight_bytes: int) -> Limits:
    """Measure, in seconds, the bandwidth on a buffer of `weight_bytes` and `bfloat16_peak`."""
    peak, unit = bfloat16_peak(len(os.sched_getaffinity(0)))
    return Limits(read_bandwidth(weight_bytes), peak, unit)


def bfloat16_peak(threads: int) -> tuple[float, str]:
    """Return the peak FLOP/s of bfloat16 weights on `threads` cores, and the unit.

    AVX-512's pairs if available, else float32 FMAs.
    """
    if pairs := pair_peak(threads):
        return pairs, "pairs"
    return fma_peak(threads), "FMA"
