"""Steps reach the file once a while and at the end; a disk that refuses them changes nothing."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rbln_backend.buckets import BucketTable
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.usage import UsageFile
from rbln_backend.worker.metrics import StepMetrics, UsageRecorder, open_recorder


def recorded(file: UsageFile) -> dict[int, int]:
    return file.read().phases["decode"].steps_by_size


def test_counts_are_written_on_close(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "model.json")
    recorder = UsageRecorder(file)
    for size in (3, 3, 1):
        recorder.note("decode", size, 4, 0.01)
    assert recorded(file) == {}
    recorder.close()
    assert recorded(file) == {3: 2, 1: 1}


def test_counts_are_written_periodically(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "model.json")
    recorder = UsageRecorder(file, period_s=0.0)
    recorder.note("decode", 2, 4, 0.01)
    deadline = time.monotonic() + 10
    while recorded(file) != {2: 1} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorded(file) == {2: 1}
    recorder.note("decode", 2, 4, 0.01)
    recorder.close()
    assert recorded(file) == {2: 2}


def test_steps_that_check_drafts_count_as_decode_steps(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "model.json")
    recorder = UsageRecorder(file)
    specs = [GraphSpec.of(Phase.DECODE, 4), GraphSpec.of(Phase.VERIFY, 4, 8)]
    metrics = StepMetrics(MetricsBoard(None, 0), specs, recorder)
    metrics.record(specs[0], 3, 3, 0.01)
    metrics.record(specs[1], 3, 20, 0.03)
    recorder.close()
    found = file.read().phases["decode"]
    assert (found.steps_by_size, found.mean_seconds()) == ({3: 2}, {4: 0.02})


def test_an_unwritable_folder_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    recorder = UsageRecorder(UsageFile(tmp_path / "taken" / "model.json"), period_s=0.0)
    recorder.note("decode", 1, 1, 0.01)
    recorder.close()


def test_each_configuration_has_its_own_file(tmp_path: Path) -> None:
    def record(
        decode: tuple[int, ...] = (1, 4), threads: int = 2, **fields: Any
    ) -> tuple[Path, str]:
        model: Any = SimpleNamespace(model="org/m", dtype=torch.float32)
        tables = {Phase.DECODE: BucketTable(decode), Phase.PREFILL: BucketTable((16,))}
        device = {"device": "cpu", "threads": threads}
        recorder = open_recorder(tmp_path, model, {"dtype": "float32"} | fields, device, tables)
        recorder.note("decode", 1, 1, 0.01)
        recorder.close()
        return recorder.path, UsageFile(recorder.path).read().about["device"]

    plain, name = record()
    assert record((2, 4)) == (plain, name), "buckets may change: step times of a bucket hold"
    adapted, named = record(lora={"max_rank": 8})
    assert (name, named) == ("cpu torch.float32", "cpu torch.float32, adapters")
    others = {record(dtype="bfloat16")[0], record(threads=4)[0], adapted}
    assert len({plain, *others}) == 4
    assert UsageFile(plain).read().steps == 2
