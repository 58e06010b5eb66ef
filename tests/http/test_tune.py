"""`rbln-serve tune` over records as servers leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rbln_backend.bucketing.usage import Usage, UsageFile, about_engine
from server.cli import main


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


def test_it_prints_what_to_set(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--cache-root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "org/one on emulated" in out
    assert "decode: 10 steps, now [8]" in out
    assert '"decode_batch_bucket_manual_buckets": [1, 3, 8]' in out
    assert "prefill: nothing recorded" in out


def test_json_and_a_choice_of_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cache-root", str(root), "--model", "two", "--decode-graphs", "2", "--json"]
    assert main(["tune", *flags]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["model"] == "org/two"
    assert len(report["advice"]["decode"]["suggested"]) == 2


def test_a_damaged_record_is_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "rbln" / "usage" / "bad.json").write_text("{")
    assert main(["tune", "--cache-root", str(root)]) == 0
    assert "bad.json is left out" in capsys.readouterr().err


def test_nothing_recorded_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--cache-root", str(tmp_path)]) == 1
    assert "no record below" in capsys.readouterr().err


def test_a_wrong_number_of_graphs_is_refused(root: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", "--cache-root", str(root), "--decode-graphs", "0"])
    assert caught.value.code == 2
