"""The record of bucket use adds up over processes and restarts, and survives damage."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rbln_backend.usage import PhaseUsage, Usage, UsageFile, about_engine


def counted(size: int, bucket: int, steps: int = 1) -> Usage:
    usage = Usage()
    for _ in range(steps):
        usage.phases["decode"].note(size, bucket, 0.5)
    return usage


def test_it_adds_up_over_restarts(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "sub" / "model.json")
    assert file.read() == Usage()
    file.add(counted(3, 4, steps=2))
    UsageFile(file.path).add(counted(1, 1))
    decode = file.read().phases["decode"]
    assert decode == PhaseUsage({3: 2, 1: 1}, {4: 2, 1: 1}, {4: 1.0, 1: 0.5})
    assert decode.mean_seconds() == {4: 0.5, 1: 0.5}
    assert file.read().phases["prefill"] == PhaseUsage()


def test_it_says_what_it_is_about(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "model.json")
    for buckets in ((1, 4), (1, 2, 4)):
        usage = counted(1, 1)
        usage.about = about_engine("m", "cpu", decode_buckets=buckets, prefill_buckets=(16,))
        file.add(usage)
    file.add(counted(1, 1))
    assert file.read().about["decode_buckets"] == [1, 2, 4]
    assert file.read().steps == 3


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: UsageFile(path).add(counted(2, 2)), range(64)))
    assert UsageFile(path).read().phases["decode"].steps_by_size == {2: 64}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.json", "model.lock"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", json.dumps({"format": 9}), '{"format": 1, "decode": 3}'),
        '{"format": 1, "about": {"x": ' + "[" * 100_000,
    ],
)
def test_a_damaged_file_is_set_aside(tmp_path: Path, text: str) -> None:
    file = UsageFile(tmp_path / "model.json")
    file.path.write_text(text)
    with pytest.raises(ValueError):
        file.read()
    file.add(counted(2, 2))
    assert file.read() == counted(2, 2)
    assert (tmp_path / "model.damaged").read_text() == text
