"""Every instruction set draws the same tokens and reports the same bits, in plain libraries."""

from __future__ import annotations

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated.build import _FLAGS, _SOURCE_DIR, LEVELS, Target

# The vectors of the level of bf16 products are those of AVX-512.
WIDTHS = [level for level in LEVELS if level.name in ("avx512", "avx2", "portable")]
DRIVER = Path(__file__).with_name("sampling_level.cpp")
SOURCES = (*sorted(_SOURCE_DIR.glob("sampling/*.cpp")), _SOURCE_DIR / "core" / "team.cpp")
ROWS, WIDTH = 40, 5_003


def build(level: Target, folder: Path) -> ctypes.CDLL:
    library = folder / f"{level.name}.so"
    command = ["g++", *_FLAGS, *level.flags, "-O1", "-Werror", "-iquote", str(_SOURCE_DIR)]
    sources = [str(source) for source in (DRIVER, *SOURCES)]
    subprocess.run(
        [*command, "-shared", "-fvisibility=default", "-o", str(library), *sources], check=True
    )
    return ctypes.CDLL(str(library))


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


@pytest.mark.wide
@pytest.mark.slow
def test_levels_agree_bit_by_bit(tmp_path: Path) -> None:
    levels = [level for level in WIDTHS if level.runs_here()]
    with ThreadPoolExecutor() as pool:
        libraries = list(pool.map(lambda level: build(level, tmp_path), levels))
    logits = torch.randn(ROWS, WIDTH) * torch.logspace(-2, 1, ROWS)[:, None]
    # Many are equal, and some alone in their bin.
    logits[::2] = logits[::2].bfloat16().float()
    temperature, top_p = torch.rand(ROWS) + 0.1, torch.rand(ROWS).clamp(min=0.01)
    top_k = torch.randint(1, 2 * WIDTH, (ROWS,), dtype=torch.int32)
    min_p = torch.rand(ROWS) * 0.1 * (torch.arange(ROWS) % 3 == 0)
    randoms = torch.empty(ROWS, dtype=torch.int64).random_(-(2**63), None)
    results = []
    for library in libraries:
        tokens = torch.full((ROWS,), -1, dtype=torch.int32)
        shape = (ctypes.c_long(ROWS), ctypes.c_long(WIDTH))
        limits = pointers(temperature, top_k, top_p, min_p, randoms, tokens)
        library.draw_rows(*pointers(logits), *shape, *limits)
        ids, values = torch.zeros(ROWS, 6, dtype=torch.int32), torch.zeros(ROWS, 6)
        ranks = torch.zeros(ROWS, dtype=torch.int64)
        library.report_rows(*pointers(logits), *shape, *pointers(tokens, ids, values, ranks))
        results.append((tokens, ids, values, ranks))
    own = torch.ops.rbln_emulator.sample(logits, temperature, top_k, top_p, min_p, randoms).view(-1)
    reported = torch.ops.rbln_emulator.top_logprobs(logits, own, 5, True)
    for result in results:
        for actual, expected in zip(result, (own, *reported), strict=True):
            assert torch.equal(actual, expected)
    assert len(own.unique()) > ROWS // 2
