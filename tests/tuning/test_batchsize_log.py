"""What vLLM logs with VLLM_LOG_BATCHSIZE_INTERVAL becomes steps by size."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rbln_backend.buckets import BucketTable
from rbln_backend.errors import BucketError
from rbln_backend.reports import metrics
from rbln_backend.reports.metrics import BatchSizeLog
from rbln_backend.usage import read_log

TABLES = {"decode": BucketTable((1, 8, 32)), "prefill": BucketTable((16, 256))}


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged, whatever engines and servers in this process did to logging before."""
    logger, handler = logging.getLogger(metrics.__name__), _Messages()
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger.manager, "disable", 0)
    monkeypatch.setattr(logger, "_cache", {})
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.told
    logger.removeHandler(handler)
    logger.setLevel(level)


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


def test_the_documents_form_has_no_times(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(
        "INFO 12-10 15:42:47 forward_context.py:58] "
        "Batchsize distribution (batchsize, count): [(32, 769), (232, 215)]\n"
    )
    usage = read_log(path, TABLES)
    assert usage.phases["decode"].steps_by_size == {32: 769}
    assert usage.phases["prefill"].steps_by_size == {232: 215}
    assert not usage.phases["decode"].mean_seconds()


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


def test_processes_add_up(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG + LOG.replace("pid=7", "pid=8"))
    assert read_log(path, TABLES).phases["decode"].steps_by_size == {1: 180, 6: 20}


_REAL_STEPS = """
from vllm import envs
envs.environment_variables["VLLM_LOG_BATCHSIZE_INTERVAL"] = lambda: 0.0
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
for size in (3, 3, 3, 300, 300):
    with set_forward_context({}, VllmConfig(), num_tokens=size):
        pass
"""


def test_what_vllm_itself_logs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    with path.open("w") as log:
        command = [sys.executable, "-c", _REAL_STEPS]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    usage = read_log(path, TABLES)
    assert usage.phases["decode"].steps_by_size == {3: 3}
    assert usage.phases["prefill"].steps_by_size == {256: 2, 44: 2}


def test_a_log_without_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text("nothing\n")
    with pytest.raises(ValueError, match="VLLM_LOG_BATCHSIZE_INTERVAL"):
        read_log(path, TABLES)
