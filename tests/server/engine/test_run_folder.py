"""The run directory: a dead server's is removed by the next one, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from server.host.files import run_folder

_HOLD = """
import sys
from pathlib import Path
from server.host.files import run_folder
with run_folder(Path(sys.argv[1])) as folder:
    (folder / "url").write_text("http://127.0.0.1:1")
    print(folder, flush=True)
    sys.stdin.read()
"""


def holding(top: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process with a run directory in ``top``."""
    command = [sys.executable, "-c", _HOLD, str(top)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def end(holder: subprocess.Popen[str], number: signal.Signals) -> None:
    holder.send_signal(number)
    holder.communicate(timeout=10)


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path) -> None:
    dead, left = holding(tmp_path)
    end(dead, signal.SIGKILL)
    assert (left / "url").exists()
    with run_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_nobody_elses_directory_is_touched(tmp_path: Path) -> None:
    live, held = holding(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "rbln-serve-link").symlink_to(elsewhere)
    (tmp_path / "rbln-serve-checkout").mkdir()
    (piped := tmp_path / "rbln-serve-pipe").mkdir()
    os.mkfifo(piped / "lock")
    (linked := tmp_path / "rbln-serve-linked").mkdir()
    (linked / "lock").symlink_to(elsewhere / "lock")
    (tmp_path / "rbln-serve-file").touch()
    before = set(tmp_path.rglob("*"))
    with run_folder(tmp_path) as folder:
        assert {p for p in tmp_path.rglob("*") if folder not in (p, *p.parents)} == before
    end(live, signal.SIGKILL)
    with run_folder(tmp_path):
        assert not held.exists()
        assert linked.exists()
