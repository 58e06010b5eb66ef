"""`rbln-serve tune` as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rbln_backend.settings import resolve
from rbln_backend.usage import Usage, UsageFile, about_engine
from server.commands.cli import main


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
    """Decode steps of three and of eleven requests."""
    path = tmp_path / "server.log"
    line = "Batchsize forward time stats (batchsize, count, median_time(ms)): "
    path.write_text(f"{line}[(3, 400, 4.0), (11, 300, 12.0)] decode, [(40, 20, 30.0)] prefill\n")
    return path


def test_it_prints_what_to_set(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--cache-root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "org/one on emulated" in out
    assert "decode: 10 steps, now [8]" in out
    assert "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS=1,3,8" in out
    assert "prefill: nothing ran" in out


def test_json_and_a_choice_of_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cache-root", str(root), "--model", "two", "--decode-graphs", "2"]
    assert main(["tune", *flags, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == "org/two on emulated (two)"
    assert len(report["decode"]["suggested"]) == 2
    assert report["saving"] > 0


def test_a_damaged_record_is_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "rbln" / "usage" / "bad.json").write_text("{")
    assert main(["tune", "--cache-root", str(root)]) == 0
    assert "bad.json is left out" in capsys.readouterr().err


def test_nothing_recorded_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--cache-root", str(tmp_path)]) == 1
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
