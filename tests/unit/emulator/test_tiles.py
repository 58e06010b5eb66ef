"""The emulated products of AMX's tiles: what their rounding is, and that the CPU's are the same."""

from __future__ import annotations

import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rbln_backend.emulator.build import _FLAGS, _SOURCE_DIR
from rbln_backend.emulator.targets import LEVELS, cpu_features, has_tiles, why_no_tiles

HERE = Path(__file__).parent
EMULATED = ("-march=native", "-DRBLN_AMX_EMULATED")
LEAST = 2.0**-126  # the least normal float

Operands = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def native_kernels() -> None:
    """Nothing of the library is needed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiles")


def build(folder: Path, name: str, flags: tuple[str, ...]) -> Path:
    program = folder / name
    if not program.exists():
        source = str(HERE / "tile_products.cpp")
        command = ["g++", *_FLAGS, *flags, "-Werror", "-iquote", str(_SOURCE_DIR), source]
        subprocess.run([*command, "-o", str(program)], check=True)
    return program


@pytest.fixture
def emulation(folder: Path) -> Path:
    if not {"avx2", "fma"} <= cpu_features():
        pytest.skip("the emulation needs fused multiply-adds")
    return build(folder, "emulated", EMULATED)


def multiply(program: Path, operands: Operands, what: str = "bf16") -> Tensor:
    """C + A B of every block: A [n, rows, 32] and B [n, 16, 16, 2] bfloat16, C [n, rows, 16].

    Or A [n, rows, 64] and B [n, 16, 16, 4] of bytes, C int32.
    """
    a, b, c = operands
    given = b"".join(
        part.view(torch.uint8).numpy().tobytes()
        for block in zip(a, b, c, strict=True)
        for part in block
    )
    done = subprocess.run(
        [str(program), what, str(a.shape[1])], input=given, capture_output=True, check=True
    )
    return torch.frombuffer(bytearray(done.stdout), dtype=c.dtype).view(c.shape)


def random_operands(count: int, rows: int, spread: int) -> Operands:
    """Numbers of either sign whose exponents lie up to ``spread`` apart from 1."""

    def numbers(*shape: int) -> Tensor:
        powers = torch.randint(-spread, spread + 1, shape)
        return torch.randn(shape) * torch.exp2(powers.float())

    a, b = numbers(count, rows, 32).bfloat16(), numbers(count, 16, 16, 2).bfloat16()
    return a, b, numbers(count, rows, 16)


def rounded(value: Fraction) -> float:
    """To float32, to nearest even; denormals become zero, what is too large infinite."""
    if value == 0 or abs(value) < Fraction(LEAST) * (1 - Fraction(1, 1 << 25)):
        return 0.0
    exponent = 0
    size = abs(value)
    while size >= 1 << 24:
        size, exponent = size / 2, exponent + 1
    while size < 1 << 23:
        size, exponent = size * 2, exponent - 1
    whole = round(size)  # to even
    result = float(whole) * 2.0**exponent
    if result >= 2.0**128:
        result = float("inf")
    return result if value > 0 else -result


def expected(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One block by exact arithmetic, rounded where the instruction rounds."""

    def flushed(value: float) -> Fraction:
        return Fraction(0) if abs(value) < LEAST else Fraction(value)

    out = torch.empty_like(c)
    for row in range(c.shape[0]):
        for column in range(16):
            sums = [0.0, 0.0]
            for depth in range(32):
                product = flushed(float(a[row, depth])) * flushed(
                    float(b[depth // 2, column, depth % 2])
                )
                sums[depth % 2] = rounded(product + Fraction(sums[depth % 2]))
            both = rounded(Fraction(sums[0]) + Fraction(sums[1]))
            out[row, column] = rounded(flushed(float(c[row, column])) + Fraction(both))
    return out


@pytest.mark.parametrize(("rows", "spread"), [(1, 0), (5, 12), (16, 3)])
def test_the_emulation_rounds_as_the_manual_says(emulation: Path, rows: int, spread: int) -> None:
    torch.manual_seed(rows)
    operands = random_operands(2, rows, spread)
    done = multiply(emulation, operands)
    for block, (a, b, c) in enumerate(zip(*operands, strict=True)):
        assert torch.equal(done[block], expected(a, b, c))


def test_denormals_are_zero_on_the_way_in_and_out(emulation: Path) -> None:
    a = torch.zeros(3, 1, 32).bfloat16()
    b = torch.zeros(3, 16, 16, 2).bfloat16()
    c = torch.zeros(3, 1, 16)
    a[0, 0, 0], b[0, 0, :, 0] = LEAST / 2, 2.0  # a denormal factor
    a[1, 0, 0], b[1, 0, :, 0] = 2.0**-70, 2.0**-60  # a denormal product
    c[2] = LEAST / 4  # a denormal sum
    assert torch.equal(multiply(emulation, (a, b, c)), torch.zeros(3, 1, 16))


def test_even_and_odd_depths_are_added_up_apart(emulation: Path) -> None:
    """2^24 + 1 is 2^24 in one sum; the ones of the other sum are not lost."""
    a = torch.ones(1, 1, 32).bfloat16()
    b = torch.ones(1, 16, 16, 2).bfloat16()
    b[0, 0, :, 0] = 2.0**24
    done = multiply(emulation, (a, b, torch.zeros(1, 1, 16)))
    assert done.unique().tolist() == [2.0**24 + 16]


def bytes_of(rows: int, signed: bool) -> Operands:
    low, high, dtype = (-128, 128, torch.int8) if signed else (0, 256, torch.uint8)
    return (
        torch.randint(low, high, (5, rows, 64)).to(dtype),
        torch.randint(0, 256, (5, 16, 16, 4)).to(torch.uint8),
        torch.randint(-(2**30), 2**30, (5, rows, 16)).int(),
    )


@pytest.mark.parametrize("what", ["signed", "unsigned"])
def test_products_of_bytes_are_exact(folder: Path, emulation: Path, what: str) -> None:
    torch.manual_seed(0)
    programs = [emulation]
    if has_tiles() and not why_no_tiles():
        programs.append(build(folder, "native", LEVELS[0].flags))
    for rows in (1, 9, 16):
        a, b, c = bytes_of(rows, what == "signed")
        columns = b.long().transpose(1, 2).reshape(5, 16, 64)
        exact = c + a.long() @ columns.transpose(1, 2)
        for program in programs:
            assert torch.equal(multiply(program, (a, b, c), what).long(), exact)


@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize("spread", [0, 10, 90])
def test_the_cpu_gives_the_emulations_bits(
    folder: Path, emulation: Path, rows: int, spread: int
) -> None:
    """Over random numbers, denormals (of wide spreads), infinities and NaN."""
    if not has_tiles():
        pytest.skip("this CPU has no AMX: its products were never compared with the emulation here")
    assert why_no_tiles() == ""
    torch.manual_seed(spread)
    a, b, c = random_operands(200, rows, spread)
    a[::7, 0, 3], b[::11, 2, 5, 1], c[::13, 0, 2] = float("inf"), float("-inf"), float("nan")
    a[::17, :, 8:10] = 2.0**-130
    silicon = multiply(build(folder, "native", LEVELS[0].flags), (a, b, c))
    emulated = multiply(emulation, (a, b, c))
    assert torch.equal(silicon.isnan(), emulated.isnan())
    assert torch.equal(
        silicon.nan_to_num(0, torch.inf, -torch.inf).view(torch.int32),
        emulated.nan_to_num(0, torch.inf, -torch.inf).view(torch.int32),
    )
