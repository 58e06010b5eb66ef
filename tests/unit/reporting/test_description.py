"""What a rank tells of itself: whole at every moment, and no reason for a start-up to fail."""

from __future__ import annotations

import json
from pathlib import Path

from rbln_backend.reports.info import DescriptionWriter, LimitsInfo, read_descriptions

LIMITS = LimitsInfo(max_model_len=8, max_num_seqs=2, max_num_batched_tokens=4)


def test_sections_add_up_and_are_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert read_descriptions(run_dir) == []
    writer = DescriptionWriter(run_dir, 0)
    writer.write("limits", LIMITS)
    writer.write("phases", {"init": 1.0})
    writer.write("phases", {"init": 1.0, "load": 2.0})
    assert read_descriptions(run_dir) == [
        {
            "limits": {"max_model_len": 8, "max_num_seqs": 2, "max_num_batched_tokens": 4},
            "phases": {"init": 1.0, "load": 2.0},
        }
    ]


def test_ranks_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        DescriptionWriter(tmp_path, rank).write("phases", {"rank": rank})
    assert [told["phases"]["rank"] for told in read_descriptions(tmp_path)] == [0, 2, 10]


def test_a_change_never_touches_the_file_that_a_reader_has_open(tmp_path: Path) -> None:
    writer = DescriptionWriter(tmp_path, 0)
    writer.write("phases", {"init": 1.0})
    with (tmp_path / "describe-0.json").open() as before:
        writer.write("phases", {"init": 1.0, "load": 22.0})
        assert json.load(before) == {"phases": {"init": 1.0}}
    assert [path.name for path in tmp_path.iterdir()] == ["describe-0.json"]


def test_neither_a_bad_disk_nor_a_bad_file_raises(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    DescriptionWriter(blocker, 0).write("limits", LIMITS)
    DescriptionWriter(None, 0).write("limits", LIMITS)
    (tmp_path / "describe-0.json").write_text("{")
    assert read_descriptions(tmp_path) == []
