"""`rbln-serve tune` as its users run it, without measuring."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from rbln_backend.bucketing.usage import Usage, UsageFile, about_engine
from rbln_backend.settings import resolve
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
def trace(tmp_path: Path) -> Path:
    """Bursts of three and of eleven requests, long apart."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 10 * burst + 0.001 * n, "prompt_tokens": 40, "output_tokens": 50}
        for burst in range(8)
        for n in range(3 if burst % 2 else 11)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
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
    assert main(["tune", *flags, "--format", "json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == "org/two on emulated (two)"
    assert len(report["decode"]["suggested"]) == 2
    assert report["verified"] is None


def test_a_damaged_record_is_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "rbln" / "usage" / "bad.json").write_text("{")
    assert main(["tune", "--cache-root", str(root)]) == 0
    assert "bad.json is left out" in capsys.readouterr().err


def test_nothing_recorded_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--cache-root", str(tmp_path)]) == 1
    assert "nothing is recorded" in capsys.readouterr().err


def test_bursts_lose_half_of_their_padding_with_as_many_graphs(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sizes.svg"
    flags = ["--trace", str(trace), "--max-num-seqs", "16", "--decode-graphs", "5"]
    assert main(["tune", *flags, "--format", "json", "--plot", str(picture)]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    decode = report["decode"]
    assert decode["current"] == [1, 2, 4, 8, 16]
    assert len(decode["suggested"]) <= 5
    assert decode["padding_then"] < decode["padding_now"] / 2
    assert report["predicted"]["saving"] > 0.1
    svg = ET.fromstring(picture.read_text())
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}line[@class='then']")) >= 5


def test_environment_lines_and_helm_values_are_what_a_server_reads(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tune", "--trace", str(trace), "--format", "env"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert main(["tune", "--trace", str(trace), "--format", "helm"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    environment = dict(line.split("=", 1) for line in lines)
    assert values == {"engine": {"env": environment}}
    for name, value in environment.items():
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
        (["--since", "yesterday"], "must be a duration such as"),
        (["--trace", "a", "--prometheus", "b"], "not allowed with"),
        (["--trace", "/nowhere"], "No such file"),
        (["--max-num-seq", "4"], "did you mean --max-num-seqs?"),
        (["--prometheus", "http://127.0.0.1:9", "--since", "9w", "--resolution", "1s"], "495 s"),
        (["--prometheus", "http://127.0.0.1:9"], "does not answer as Prometheus does"),
    ],
)
def test_a_wrong_command_line_is_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", *flags])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max_num_seqs=8"], "--max-num-seqs follows from the buckets"),
        (
            ["--additional-config", '{"rbln": {"prefill_chunk_buckets": [16]}}'],
            "names prefill_chunk_buckets",
        ),
    ],
)
def test_what_is_tried_cannot_be_given(
    flags: list[str], reason: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--trace", str(trace), "--measure", "model", *flags]
    with pytest.raises(SystemExit) as caught:
        main(["tune", *given])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_context_that_is_too_short_for_the_buckets_is_said(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = ["--measure", "model", "--max-model-len", "192"]
    assert main(["tune", "--trace", str(trace), "--prefill-buckets", "64,256", *measured]) == 1
    assert (
        "--max-model-len 192 is less than the prefill bucket 256; say --prefill-buckets with sizes"
        " up to 192" in capsys.readouterr().err
    )
