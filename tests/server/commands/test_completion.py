"""Completion scripts, run by the shells that are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from server.commands.cli import COMMANDS, main

SHELLS = ("bash", "zsh", "fish")


def _script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_all_commands_and_flags(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _script(shell, capsys)
    words = set(re.findall(r"[a-z][a-z0-9-]+", text))
    assert words >= COMMANDS.keys()
    # Of ours, of vLLM, of its client, of a subcommand.
    assert words >= {"drain-timeout-s", "max-num-seqs", "num-prompts", "quarantine"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_reads_its_script(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(_script(shell, capsys), encoding="utf-8")
    subprocess.run([shell, "-n", str(path)], check=True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rbln-serve coll", "collect-env"),
        ("rbln-serve serve m --drain", "--drain-timeout-s"),
        ("rbln-serve serve m --max-num-se", "--max-num-seqs"),
        ("rbln-serve cache verify --quar", "--quarantine"),
        ("rbln-serve bench --num-pro", "--num-prompts"),
        ("rbln-serve serve some/fol", ""),
    ],
)
def test_bash_completes(
    line: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "script"
    path.write_text(_script("bash", capsys), encoding="utf-8")
    words = line.split()
    program = (
        f"source {path}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n"
        "_rbln_serve; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
    assert done.stderr == ""
