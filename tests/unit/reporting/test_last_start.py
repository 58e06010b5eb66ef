"""The seconds of the last start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rbln_backend.reports.progress import LastStart


def test_the_last_start_is_known_below_its_cache_root(tmp_path: Path) -> None:
    assert LastStart(tmp_path).seconds() is None
    LastStart(tmp_path).keep(9.0)
    LastStart(tmp_path).keep(4.25)
    assert LastStart(tmp_path).seconds() == 4.25
    assert LastStart(tmp_path / "other").seconds() is None


@pytest.mark.parametrize(
    "content", ["", "null", "[" * 100_000, '"4"', "-1.0", "1e400", "NaN", "\xff", "{}"]
)
def test_a_damaged_file_is_ignored(content: str, tmp_path: Path) -> None:
    file = tmp_path / "rbln" / "last_start.json"
    file.parent.mkdir()
    file.write_text(content, encoding="latin-1")
    assert LastStart(tmp_path).seconds() is None
    LastStart(tmp_path).keep(2.0)
    assert LastStart(tmp_path).seconds() == 2.0


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "rbln").write_text("not a folder")
    LastStart(tmp_path).keep(2.0)
    assert LastStart(tmp_path).seconds() is None
