"""The tuner finds the best set of buckets, and predicts what it saves."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import forward_context
from vllm.config import VllmConfig

from rbln_backend.buckets import BucketTable
from rbln_backend.errors import BucketError
from rbln_backend.reports import metrics
from rbln_backend.reports.metrics import BatchSizeLog
from rbln_backend.settings import resolve
from rbln_backend.usage import (
    LEAST_STEPS,
    NOISE,
    StepTimes,
    Usage,
    UsageFile,
    about_engine,
    advise,
    read_log,
    suggest,
)
from server.commands.cli import main

ROWS = StepTimes({})


def cost(counts: Mapping[int, int], times: StepTimes, buckets: tuple[int, ...]) -> float:
    table = BucketTable(buckets)
    return sum(count * times.of(table.find(size)) for size, count in counts.items())


@given(
    counts=st.dictionaries(st.integers(1, 9), st.integers(0, 50), min_size=1),
    times=st.dictionaries(st.integers(1, 9), st.floats(0.001, 1.0)),
    limit=st.integers(1, 5),
)
def test_no_other_set_is_cheaper(
    counts: dict[int, int], times: dict[int, float], limit: int
) -> None:
    step_times = StepTimes(times)
    found = suggest(counts, step_times, BucketTable((2, 9)), limit)
    assert len(found.suggested) <= limit
    assert found.suggested.largest == 9
    every = ((*smaller, 9) for size in range(limit) for smaller in combinations(range(1, 9), size))
    best = min(cost(counts, step_times, buckets) for buckets in every)
    assert found.then.seconds == pytest.approx(best)
    assert found.then.seconds == pytest.approx(cost(counts, step_times, found.suggested.sizes))


def test_thousands_of_sizes_are_searched_exactly() -> None:
    # All sizes alike and a step that costs its tokens: equal distances are the best.
    counts = dict.fromkeys(range(1, 4097), 3)
    found = suggest(counts, ROWS, BucketTable((4096,)), 8)
    assert found.suggested.sizes == tuple(range(512, 4097, 512))


def test_a_worked_example() -> None:
    counts = {1: 700, 6: 250, 32: 50}
    found = suggest(counts, ROWS, BucketTable((8, 32)), 3)
    assert found.suggested.sizes == (1, 6, 32)
    assert (found.now.steps, found.then.steps) == (1000, 1000)
    assert found.now.seconds == 700 * 8 + 250 * 8 + 50 * 32
    assert found.then.seconds == 700 + 1500 + 1600
    assert (found.now.padded, found.then.padded) == (700 * 7 + 250 * 2, 0)
    assert found.now.padding == pytest.approx(5400 / 9200)
    assert found.saving == pytest.approx(1 - 3800 / 9200)
    # Up to 4 rows a step takes the same time: smaller graphs would be for nothing.
    flat = StepTimes({1: 0.01, 4: 0.01, 8: 0.02})
    found = suggest({1: 10, 2: 10, 3: 10, 4: 10, 8: 1}, flat, BucketTable((8,)), 8)
    assert found.suggested.sizes == (4, 8)
    # Nothing is recorded.
    found = suggest({}, ROWS, BucketTable((1, 4)), 4)
    assert found.suggested.sizes == (4,)
    assert (found.then.steps, found.then.padding, found.saving) == (0, 0.0, 0.0)


def test_times_are_interpolated_and_never_fall() -> None:
    times = StepTimes({2: 0.2, 4: 0.1, 8: 0.6})
    assert [times.of(n) for n in (2, 3, 4, 6, 8, 10)] == pytest.approx(
        [0.2, 0.2, 0.2, 0.4, 0.6, 0.8]
    )
    assert StepTimes({4: 0.1}).of(2) == 0.1
    assert StepTimes({4: 0.1}).of(8) == 0.2
    assert StepTimes({4: 0.1, 5: 0.4}).of(2) == 0.05


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BucketError, match=r"1 to 5 .* up to 4"):
        suggest({1: 1, 5: 1}, ROWS, BucketTable((4,)), 2)
    with pytest.raises(BucketError, match="greater than 0, got 0"):
        suggest({1: 1}, ROWS, BucketTable((4,)), 0)


# ------------------------------------------------------------------------------------------- advice
def usage(
    steps: Mapping[tuple[int, int], tuple[int, float]], buckets: Sequence[int] = (8,)
) -> Usage:
    """Decode steps by size and bucket: how many ran, and the seconds of one."""
    told = Usage(about=about_engine("m", "cpu", decode_buckets=buckets, prefill_buckets=(2048,)))
    for (size, bucket), (count, seconds) in steps.items():
        told.phases["decode"].note(size, bucket, count * seconds, count)
    return told


def decode(
    steps: Mapping[tuple[int, int], tuple[int, float]], buckets: Sequence[int] = (8,)
) -> dict[str, Any]:
    told: dict[str, Any] = advise(usage(steps, buckets))["decode"]
    return told


def test_it_names_sizes_saving_and_setting() -> None:
    # A smaller bucket was measured at less than half the time.
    told = usage({(1, 8): (60, 0.01), (5, 8): (20, 0.01), (1, 1): (LEAST_STEPS, 0.004)})
    advice = advise(told)
    assert advice["prefill"] is None
    decode = advice["decode"]
    assert decode["current"] == [8]
    assert decode["suggested"] == [1, 5, 8]
    assert 0.3 < decode["saving"] < 0.6
    assert decode["padding_then"] == 0.0
    assert decode["padding_now"] > 0.6
    assert decode["noise"] == NOISE
    assert '"decode_batch_bucket_manual_buckets": [1, 5, 8]' in decode["setting"]


def test_a_bucket_that_hardly_ran_says_nothing_of_its_time() -> None:
    steps = {(1, 8): (60, 0.01), (5, 8): (20, 0.01)}
    assert decode({**steps, (1, 1): (LEAST_STEPS - 1, 0.004)})["suggested"] == [8]
    assert decode(steps)["suggested"] == [8], "one bucket says nothing of smaller ones"


def test_a_bucket_that_most_steps_use_stays_however_its_times_wander() -> None:
    """79 % of the steps ran in bucket 1, a little slower than 2 in a loaded hour."""
    steps = {(1, 1): (790, 0.0021), (2, 2): (100, 0.0020), (3, 4): (110, 0.0030)}
    told = decode(steps, (1, 2, 4))
    assert told["suggested"] == told["current"] == [1, 2, 4]
    assert told["saving"] == 0.0
    # Also where something else is worth a change.
    told = decode({**steps, (20, 32): (900, 0.0300)}, (1, 2, 4, 32))
    assert {1, 2, 20, 32} <= {*told["suggested"]}
    assert told["saving"] > told["noise"]


def test_a_gain_within_the_noise_is_no_advice() -> None:
    few, many = 40, 400
    for count, wanted in ((few, [1, 8]), (many, [1, 5, 8])):
        steps = {(1, 1): (1000, 0.004), (8, 8): (1000, 0.010), (5, 8): (count, 0.010)}
        assert decode(steps, (1, 8))["suggested"] == wanted


def test_times_that_do_not_explain_what_ran_are_noise() -> None:
    """The smaller bucket took three times as long: two kinds of load, not two kinds of bucket."""
    calm = {(1, 1): (500, 0.010), (3, 4): (500, 0.030), (20, 32): (500, 0.060)}
    assert decode(calm, (1, 4, 32))["suggested"] != [1, 4, 32]
    mixed = {(1, 1): (500, 0.030), (3, 4): (500, 0.010), (20, 32): (500, 0.060)}
    told = decode(mixed, (1, 4, 32))
    assert told["noise"] == 0.2
    assert told["suggested"] == [1, 4, 32]


def test_sizes_that_the_engine_no_longer_takes_are_left_out() -> None:
    assert advise(Usage()) == {"prefill": None, "decode": None}
    assert advise(usage({(12, 12): (5, 0.01)}))["decode"] is None
    assert decode({(12, 12): (5, 0.01), (2, 8): (1, 0.01)})["steps"] == 1


def test_many_sizes_are_taken_as_they_are() -> None:
    told = usage({})
    for size in range(1, 2049):
        told.phases["prefill"].note(size, 2048, 0.1)
    told.phases["prefill"].note(1, 16, 0.01 * LEAST_STEPS, LEAST_STEPS)
    prefill = advise(told)["prefill"]
    assert len(prefill["suggested"]) == 6
    assert prefill["padding_then"] < prefill["padding_now"]


# ------------------------------------------------------------------------------------ batchsize log
TABLES = {"decode": BucketTable((1, 8, 32)), "prefill": BucketTable((16, 256))}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    say = lambda line, *args: lines.append(line % args if args else line)  # noqa: E731
    monkeypatch.setattr(metrics.logger, "info", say)
    return lines


LOG = """\
(EngineCore pid=7) INFO 11-21 23:18:00 [forward_context.py:380] Batchsize forward time stats \
(batchsize, count, median_time(ms)): [(1, 5, 2.0)]
(EngineCore pid=7) INFO 11-21 23:19:00 [forward_context.py:380] Batchsize forward time stats \
(batchsize, count, median_time(ms)): [(1, 90, 2.0), (6, 10, 3.0), (300, 4, 50.0), (40, 2, 9.0)]
"""


def test_the_last_line_of_a_process_says_all(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text("something else\n" + LOG)
    usage = read_log(path, TABLES)
    assert usage.phases["decode"].steps_by_size == {1: 90, 6: 10}
    assert usage.phases["decode"].mean_seconds() == pytest.approx({1: 0.002, 6: 0.003})
    # A step of 300 tokens is two chunks here, and its time is that of neither.
    assert usage.phases["prefill"].steps_by_size == {256: 4, 44: 4, 40: 2}
    assert usage.phases["prefill"].mean_seconds() == pytest.approx({40: 0.009})
    # Processes add up.
    path.write_text(LOG + LOG.replace("pid=7", "pid=8"))
    assert read_log(path, TABLES).phases["decode"].steps_by_size == {1: 180, 6: 20}
    # The documents' form has no times.
    path.write_text("forward_context.py:58] Batchsize distribution (batchsize, count): [(32, 769)]")
    decode = read_log(path, TABLES).phases["decode"]
    assert (decode.steps_by_size, decode.mean_seconds()) == ({32: 769}, {})
    path.write_text("nothing\n")
    with pytest.raises(ValueError, match="VLLM_LOG_BATCHSIZE_INTERVAL"):
        read_log(path, TABLES)


@pytest.mark.parametrize("form", ["%s", '{"message": "%s", "tags": ["a"]}'])
def test_this_server_says_which_steps_were_prefills(
    tmp_path: Path, told: list[str], form: str
) -> None:
    log = BatchSizeLog(interval_s=3600.0)
    log.note("decode", 3, 0.002)
    log.log()
    for phase, size, seconds in (("decode", 3, 0.004), ("decode", 1, 0.001), ("prefill", 9, 1)):
        log.note(phase, size, seconds)
    log.log()
    log.log()
    assert len(told) == 2, "once for each piece of news"
    (path := tmp_path / "server.log").write_text("\n".join(form % m for m in told))
    usage = read_log(path, TABLES)
    assert usage.phases["decode"].steps_by_size == {3: 2, 1: 1}
    assert usage.phases["prefill"].steps_by_size == {9: 1}
    # The time of a padded step is that of its bucket.
    assert usage.phases["decode"].mean_seconds() == pytest.approx({8: 0.003, 1: 0.001})
    with pytest.raises(BucketError, match="batch size 3"):
        read_log(path, TABLES | {"decode": BucketTable((1, 2))})


def test_a_line_is_due_after_the_interval(told: list[str]) -> None:
    always, never = BatchSizeLog(interval_s=0.0), BatchSizeLog(interval_s=3600.0)
    never.note("decode", 1, 0.001)
    assert not told
    always.note("decode", 2, 0.001)
    always.note("decode", 2, 0.003)
    assert len(told) == 2
    assert told[1].endswith("[(2, 2, 2.0)] decode, [] prefill")


def test_what_vllm_itself_logs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As vLLM reads VLLM_LOG_BATCHSIZE_INTERVAL=0 when it is imported.
    monkeypatch.setattr(forward_context, "track_batchsize", True)
    monkeypatch.setattr(forward_context, "batchsize_logging_interval", 0.0)
    monkeypatch.setattr(forward_context, "batchsize_forward_time", defaultdict(list))
    lines: list[str] = []
    monkeypatch.setattr(
        forward_context.logger, "info", lambda line, *args: lines.append(line % args)
    )
    for size in (3, 3, 3, 300, 300):
        with forward_context.set_forward_context({}, VllmConfig(), num_tokens=size):
            pass
    (path := tmp_path / "vllm.log").write_text("\n".join(lines))
    usage = read_log(path, TABLES)
    assert usage.phases["decode"].steps_by_size == {3: 3}
    assert usage.phases["prefill"].steps_by_size == {256: 2, 44: 2}


# ------------------------------------------------------------------------------------------ command
@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, sizes in (("org/one", (8,)), ("org/two", (1, 8))):
        usage = Usage(
            about=about_engine(name, "emulated", decode_buckets=sizes, prefill_buckets=(64,))
        )
        for size, bucket, seconds in ((1, 1, 0.002), *[(3, 8, 0.01)] * 9):
            usage.phases["decode"].note(size, bucket, seconds)
        UsageFile(tmp_path / "rbln" / "usage" / f"{name[-3:]}.json").add(usage)
    return tmp_path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    line = "Batchsize forward time stats (batchsize, count, median_time(ms)): "
    path.write_text(f"{line}[(3, 400, 4.0), (11, 300, 12.0)] decode, [(40, 20, 30.0)] prefill\n")
    return path


def test_it_prints_what_to_set(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "rbln" / "usage" / "bad.json").write_text("{")
    assert main(["tune", "--cache-root", str(root)]) == 0
    out, err = capsys.readouterr()
    assert "org/one on emulated" in out
    assert "decode: 10 steps, now [8]" in out
    assert "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS=1,3,8" in out
    assert "prefill: nothing ran" in out
    assert "bad.json is left out" in err
    # As JSON, of a chosen model.
    flags = ["--cache-root", str(root), "--model", "two", "--decode-graphs", "2"]
    assert main(["tune", *flags, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == "org/two on emulated (two)"
    assert len(report["decode"]["suggested"]) == 2
    assert report["saving"] > 0
    assert main(["tune", "--cache-root", str(root / "empty")]) == 1
    assert "nothing is recorded" in capsys.readouterr().err


def test_a_log_loses_half_of_its_padding_with_as_many_graphs(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batchsize-log", str(log), "--max-num-seqs", "16", "--decode-graphs", "5"]
    assert main(["tune", *flags, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    decode = report["decode"]
    assert decode["current"] == [1, 2, 4, 8, 16]
    assert len(decode["suggested"]) <= 5
    assert decode["padding_then"] < decode["padding_now"] / 2
    assert report["saving"] > 0.1


def test_a_log_without_times_counts_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "vllm.log").write_text(
        "Batchsize distribution (batchsize, count): [(3, 10), (4, 10)]\n"
    )
    flags = ["--batchsize-log", str(path), "--decode-buckets", "4", "--decode-graphs", "2"]
    assert main(["tune", *flags]) == 0
    out = capsys.readouterr().out
    # 30 and 40 rows instead of twice 40.
    assert "12.5% less step time predicted, from rows and tokens" in out
    assert "better [3, 4], 0.0% padding" in out


def test_the_printed_variables_are_what_a_server_reads(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tune", "--batchsize-log", str(log)]) == 0
    lines = capsys.readouterr().out.partition("to set it:\n")[2].splitlines()
    for line in lines:
        name, value = line.strip().split("=", 1)
        monkeypatch.setenv(name, value)
    config = resolve(None).config
    assert config.decode_batch_bucket_strategy == "manual"
    assert config.decode_batch_bucket_manual_buckets[-1] == 32
    assert config.prefill_chunk_buckets is not None
    assert config.prefill_chunk_buckets[-1] == 256


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--decode-graphs", "0"], "must be 1 or more, got 0"),
        (["--batchsize-log", "/nowhere"], "No such file"),
        (["--max-num-seq", "4"], "did you mean --max-num-seqs?"),
    ],
)
def test_a_wrong_command_line_is_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", *flags])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err
