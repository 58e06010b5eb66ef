"""Drawn tokens: vLLM's distribution and limits, ties and edges included, the same bits anywhere.

Random numbers that lie evenly spread give every token its share of the draws, to one draw.
"""

import ctypes
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler

from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.build import _FLAGS, _SOURCE_DIR, LEVELS, Target
from rbln_backend.devices.emulated.kernel_set import set_threads
from rbln_backend.worker.sampling import OutputTokens
from tests.unit.emulator.cases import DTYPES, one_dtype_each

sample = torch.ops.rbln_emulator.sample
MANY = 20_000


def evenly(count: int) -> Tensor:
    return (torch.arange(count) - count // 2) * (2**64 // count)


def limits(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    top_k = torch.randint(1, width + 1, (rows,), dtype=torch.int32)
    return top_k, torch.rand(rows).clamp(min=0.01), torch.rand(rows) * 0.3


def shares(logits: Tensor, options: Mapping[str, float]) -> Tensor:
    """Return each token's share of ``MANY`` draws from logits [V]."""

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.full((MANY,), options[name], dtype=dtype) if name in options else None

    temperature = torch.full((MANY,), options.get("temperature", 1.0))
    chosen = (column("top_k", torch.int32), column("top_p"), column("min_p"))
    tokens = sample(logits.expand(MANY, -1), temperature, *chosen, evenly(MANY))
    return torch.bincount(tokens.flatten(), minlength=len(logits)) / MANY


def vllm_shares(logits: Tensor, options: Mapping[str, float]) -> Tensor:
    """The probabilities that vLLM's sampler draws by."""
    scores = logits.float()[None] / options.get("temperature", 1.0)
    if "min_p" in options:
        probabilities = scores.softmax(-1)
        scores[probabilities < probabilities.amax() * options["min_p"]] = -torch.inf
    k = torch.tensor([options["top_k"]], dtype=torch.int32) if "top_k" in options else None
    p = torch.tensor([options["top_p"]]) if "top_p" in options else None
    return apply_top_k_top_p_pytorch(scores, k, p).softmax(-1)[0]


LIMITS = [
    {},
    {"temperature": 0.3},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.6, "min_p": 0.02},
]


@pytest.mark.parametrize("options", LIMITS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize(("width", "dtype"), one_dtype_each([77, 3000, 1]))
def test_shares_are_vllms(options: dict[str, float], width: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(width) * 2).to(dtype)
    if options.get("top_k", 0) > width:
        options = options | {"top_k": width}
    drawn, expected = shares(logits, options), vllm_shares(logits, options)
    if width == 3000:
        # There vLLM's sort leaves open which of equal ones is dropped.
        drawn, expected = drawn.sort().values, expected.sort().values
    assert float((drawn - expected).abs().max()) < 2.5 / MANY
    assert not drawn[expected == 0].any()


@pytest.mark.parametrize(
    ("logits", "options", "kept"),
    [
        # Of equal ones top_p drops the first first, and top_k none.
        ([0.0] * 4, {"top_p": 0.5}, [2, 3]),
        ([0.0] * 4, {"top_p": 0.51}, [1, 2, 3]),
        ([0.0] * 40, {"top_p": 0.01}, [39]),
        ([1.0, 2.0, 1.0, 1.0], {"top_k": 2}, [0, 1, 2, 3]),
        ([1.0, 2.0, 1.0, 0.0], {"top_k": 2, "top_p": 0.5}, [1]),
        ([1.0, 2.0, 1.0, 0.0], {"top_k": 2, "top_p": 0.7}, [1, 2]),
        # A sum that is 1 - top_p exactly is dropped.
        ([0.75, 0.25], {"top_p": 0.75, "is_log": True}, [0]),
        ([0.25, 0.5, 0.125, 0.125], {"top_p": 0.75, "is_log": True}, [0, 1]),
        ([0.25, 0.5, 0.125, 0.125], {"top_p": 0.8, "is_log": True}, [0, 1, 3]),
        ([0.5, 0.25, 0.25], {"min_p": 0.5, "is_log": True}, [0, 1, 2]),
        ([0.5, 0.25, 0.25], {"min_p": 1.0, "is_log": True}, [0]),
        ([-torch.inf, 3.0, -torch.inf, 3.0], {"top_k": 3}, [1, 3]),
        ([-torch.inf, 3.0, torch.nan, 3.0], {"top_p": 0.99}, [1, 3]),
        ([-torch.inf, torch.inf, 3.0], {"top_p": 0.9}, [1]),
        ([torch.nan] * 20, {"top_k": 3, "top_p": 0.9}, [0]),
        ([-torch.inf] * 20, {}, [0]),
    ],
)
def test_ties_edges_and_infinities(
    logits: list[float], options: dict[str, float], kept: list[int]
) -> None:
    own = dict(options)
    row = torch.tensor(logits)
    if own.pop("is_log", False):
        row = row.log2() * torch.tensor(2.0).log()
    drawn = shares(row, own)
    assert drawn.nonzero().flatten().tolist() == kept
    # Its sort leaves the order of more than 16 equal ones open.
    if row.isfinite().all() and len(row) <= 16:
        assert vllm_shares(row, own).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("spread", [0.0, pytest.param(1e-4, marks=pytest.mark.wide), 1.0, 40.0])
def test_the_limits_of_a_large_vocabulary_are_vllms(spread: float) -> None:
    """Thousands of tokens are equal in bfloat16, and none is drawn that vLLM would not draw."""
    row, draws = (torch.randn(50_000) * spread).bfloat16(), 2000
    for options in ({"top_p": 0.3}, {"top_k": 999}, {"top_k": 30_000, "top_p": 0.5}):
        expected = vllm_shares(row, options)
        tokens = sample(
            row.expand(draws, -1),
            torch.ones(draws),
            torch.full((draws,), options.get("top_k", 50_000), dtype=torch.int32),
            torch.full((draws,), options.get("top_p", 1.0)),
            None,
            evenly(draws),
        ).flatten()
        least = float(row[expected > 0].min())
        assert float(row[tokens].min()) >= least
        # By number of draws for each distinct score.
        scores, places = row.unique(return_inverse=True)
        drawn = torch.zeros(len(scores)).index_add_(
            0, places[tokens], torch.full((draws,), 1 / draws)
        )
        wanted = torch.zeros(len(scores)).index_add_(0, places, expected)
        assert float((drawn - wanted).abs().max()) < 0.02


def test_a_million_draws_pass_a_chi_squared_test() -> None:
    count = 1_000_000
    logits = torch.randn(40) * 2
    generator = torch.Generator().manual_seed(4)
    randoms = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    temperature, top_p = torch.full((count,), 0.8), torch.full((count,), 0.97)
    set_threads(2)
    tokens = sample(logits.expand(count, -1), temperature, None, top_p, None, randoms)
    counts = torch.bincount(tokens.flatten(), minlength=40).double()
    expected = vllm_shares(logits, {"temperature": 0.8, "top_p": 0.97}).double() * count
    kept = expected > 0
    assert not counts[~kept].any()
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Five deviations from its mean.
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 13, 500, 20_001])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_every_body_and_thread_count_draws_the_same(
    spread: float, width: int, dtype: torch.dtype
) -> None:
    rows = 9
    logits = (torch.randn(rows, width + 3) * spread).to(dtype)[:, :width]
    temperature = torch.rand(rows) * 2
    temperature[3] = 0.0
    randoms = torch.empty(rows, dtype=torch.int64).random_(-(2**63), None)
    top_k, top_p, min_p = limits(rows, width)
    for chosen in ((None, None, None), (None, top_p, None), (top_k, None, min_p)):
        expected = fallback.sample(logits, temperature, *chosen, randoms)
        for threads in (1, 3):
            set_threads(threads)
            assert torch.equal(sample(logits, temperature, *chosen, randoms), expected)
        for row in range(rows):
            own = [None if values is None else values[row : row + 1] for values in chosen]
            alone = sample(
                logits[row : row + 1], temperature[row : row + 1], *own, randoms[row:][:1]
            )
            assert torch.equal(alone[0], expected[row])


def test_a_wrong_number_of_parameters_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"temperature is .* for 2 rows"):
        sample(torch.zeros(2, 5), torch.ones(1), None, None, None, evenly(2))


# ---------------------------------------------------------------------------------- sampling levels
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


# ---------------------------------------------------------------------------------------- penalties
OPS = torch.ops.rbln_emulator


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [7, 1000])
def test_penalties_are_vllms(width: int, threads: int) -> None:
    set_threads(threads)
    rows = 7
    logits = torch.randn(rows, width) * 4
    logits[2, :3] = torch.tensor([-torch.inf, torch.inf, 0.0])
    # Padding is the number behind the last token, as vLLM has it.
    prompts = torch.randint(0, width + 1, (rows, 1500))
    outputs = [torch.randint(0, width, (row * 300,)).tolist() for row in range(rows)]
    presence, frequency = torch.rand(rows) - 0.5, torch.rand(rows)
    repetition = torch.rand(rows) + 0.5
    repetition[1], presence[3], frequency[3], repetition[3] = 1.0, 0.0, 0.0, 1.0
    penalties = (presence, frequency, repetition)
    expected = apply_all_penalties(logits.clone(), prompts, *penalties, outputs)
    for penalize in (OPS.penalize_, fallback.penalize_):
        actual = logits.clone()
        penalize(actual, prompts, *OutputTokens().joined(outputs), *penalties)
        assert torch.equal(actual, expected)


def test_copies_of_outputs_follow_their_lists() -> None:
    tokens, lists = OutputTokens(), [[1, 2], [], [3]]
    for step in range(300):
        lists[step % 3].append(step)
        if step == 150:
            # Another request, and one that starts over.
            lists[1], lists[2][:] = [9], [8]
        if step == 200:
            lists = [lists[2], lists[0], lists[1]]
        joined, ends = tokens.joined(lists)
        assert joined.tolist() == [token for own in lists for token in own]
        assert ends.tolist() == [sum(map(len, lists[: row + 1])) for row in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 129, 30_001])
def test_logprobs_are_vllms(width: int, dtype: torch.dtype) -> None:
    rows = 6
    logits = (torch.randn(rows, width) * 5).to(dtype)
    logits[1, 1:] = -torch.inf
    tokens = torch.randint(0, width, (rows,), dtype=torch.int32)
    tokens[1] = 0
    for count in (0, 1, 5):
        for raw in (False, True):
            scores = logits.float() if raw else Sampler.compute_logprobs(logits)
            expected = Sampler.gather_logprobs(scores, count, tokens.long())
            for threads in (1, 3):
                set_threads(threads)
                ids, values, ranks = OPS.top_logprobs(logits, tokens, count, not raw)
                exact = logits.double() if raw else logits.double().log_softmax(-1)
                exact = exact.gather(1, ids.long())
                torch.testing.assert_close(values.double(), exact, rtol=1e-7, atol=2e-6)
                # vLLM's sums are in float32.
                torch.testing.assert_close(values, expected.logprobs, rtol=1e-6, atol=2e-5)
                assert torch.equal(ids[:, 0], tokens)
                assert torch.equal(ranks, ranks_of(logits, tokens))


def ranks_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Counted by logits: vLLM counts float32 log-probabilities, of which more are equal."""
    return (logits >= logits.gather(1, tokens.long()[:, None])).sum(-1)


def test_the_first_of_equal_tokens_is_the_likeliest() -> None:
    logits = torch.zeros(2, 40)
    logits[:, 30] = 1.0
    ids, values, ranks = OPS.top_logprobs(logits, torch.tensor([7, 30], dtype=torch.int32), 3, True)
    assert ids.tolist() == [[7, 30, 0, 1], [30, 30, 0, 1]]
    assert ranks.tolist() == [40, 1]
    assert bool((values[:, 1:].diff() <= 0).all())


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(IndexError, match=r"tokens\[0\] is 5"):
        OPS.top_logprobs(torch.zeros(1, 5), torch.tensor([5], dtype=torch.int32), 1, True)
    with pytest.raises(IndexError, match=r"output_ends\[0\] is 2 of 1"):
        OPS.penalize_(
            torch.zeros(1, 5),
            torch.zeros(1, 1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([2]),
            *(torch.ones(1),) * 3,
        )


# ------------------------------------------------------------------------------------------- greedy
greedy = torch.ops.rbln_emulator.greedy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 33, 1000, 32001])
def test_it_is_argmax(dtype: torch.dtype, width: int) -> None:
    logits = torch.randn(5, width + 3).to(dtype)[:, :width]
    expected = logits.float().argmax(-1, keepdim=True).int()
    low = -torch.inf
    odd = [[low] * 40, [low] * 39 + [0.0], [torch.nan] * 40, [torch.nan] * 20 + [1.0] * 20]
    for body in (greedy, fallback.greedy):
        assert torch.equal(body(logits), expected)
        assert body(torch.tensor(odd)).tolist() == [[0], [39], [0], [20]]
    with pytest.raises(RuntimeError, match="instead of"):
        greedy(torch.zeros(3))


@pytest.mark.parametrize("places", [[0, 1], [3, 40], [63, 64], [8, 70]])
def test_the_first_of_equals_wins(places: list[int]) -> None:
    logits = torch.zeros(2, 71)
    logits[:, places] = 2.0
    assert greedy(logits).tolist() == [[places[0]]] * 2


@pytest.mark.parametrize("places", [[0, 1024], [1023, 1024], [1500, 4999], [4990, 4999]])
def test_the_first_of_equals_wins_in_other_blocks(places: list[int]) -> None:
    logits = torch.full((2, 5000), -torch.inf)
    logits[:, ::7] = torch.nan
    logits[:, 3] = -1.0
    logits[:, places] = 2.0
    assert greedy(logits).tolist() == [[places[0]]] * 2
