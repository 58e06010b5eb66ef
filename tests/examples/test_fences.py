"""The commands of README and docs/ work as they are typed.

A block of ``sh`` or ``python`` runs against a server of the default model, unless its fence says
``no-run: REASON``; then only its programs, targets and flags are checked.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.architecture.source_tree import ROOT
from tests.server.real_server import RealServer
from tests.warm_process import warm_process

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_MARKER = "no-run: "
_SEPARATORS = {"|", "||", "&&", ";", "&"}


@dataclass(frozen=True)
class Fence:
    page: str
    line: int
    language: str
    text: str
    no_run: str | None
    """The reason why it does not run; None if it runs."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences(*languages: str) -> tuple[Fence, ...]:
    """Return the blocks of these languages. Raises `ValueError` for an unknown marker."""
    pages = ["README.md", "examples/README.md"]
    pages += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
    return tuple(fence for page in pages for fence in _of_page(page) if fence.language in languages)


def _of_page(page: str) -> Iterator[Fence]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        indent, info, body = found.groups()
        line = text.count("\n", 0, found.start()) + 1
        language, _, rest = info.partition(" ")
        if rest and not (rest.startswith(_MARKER) and rest.removeprefix(_MARKER).strip()):
            raise ValueError(f"{page}:{line}: a fence says `no-run: REASON` or nothing: {info!r}")
        lines = (row.removeprefix(indent) for row in body.splitlines(keepends=True))
        reason = rest.removeprefix(_MARKER) if rest else None
        yield Fence(page, line, language, "".join(lines), reason)


def commands(fence: Fence) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell block, without assignments."""
    for line in fence.text.replace("\\\n", " ").split("\n"):
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # A quotation over several lines: the data of a curl.
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if word in _SEPARATORS:
                if command:
                    yield command
                command = []
            elif command or not re.match(r"^[A-Z_]+=", word):
                command.append(word)


_MODEL = ROOT / "build" / "default-model"
_ADAPTER = ROOT / "default_model" / "checkpoint" / "adapter"
_RUNNING = [fence for fence in fences("sh", "python") if fence.no_run is None]
_SHELL = fences("sh")
_VLLM = next(iter(find_spec("vllm").submodule_search_locations or ()))  # type: ignore[union-attr]
_PROGRAMS = {"rbln-serve": None, "vllm": Path(_VLLM) / "entrypoints/cli/main.py"}
# The first words of a command of two words, and whether it takes vLLM's flags, too.
_NESTED = {"cache"}
_WITH_VLLM_FLAGS = {"serve", "check", "compile", "batch", "cache inspect"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server of the default model with a store, an adapter slot and drafts."""
    folder = tmp_path_factory.mktemp("server")
    flags = (
        *"--served-model-name default-model --max-model-len 1024".split(),
        "--max-num-batched-tokens",
        "256",
        "--data-dir",
        str(folder / "data"),
        "--enable-lora",
        "--max-lora-rank",
        "16",
        "--lora-modules",
        f"pirate={_ADAPTER}",
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 3}',
    )
    with RealServer(_MODEL, folder, *flags) as running:
        running.until_ready()
        yield running


@pytest.fixture(scope="module")
def pooling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server of embeddings, for the blocks that name port 8001."""
    folder = tmp_path_factory.mktemp("pooling")
    flags = ("--served-model-name", "default-model", "--runner", "pooling")
    with RealServer(_MODEL, folder, *flags) as running:
        running.until_ready()
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository; what commands write stays in it."""
    root = tmp_path_factory.mktemp("repository")
    for path in ROOT.iterdir():
        (root / path.name).symlink_to(path)
    return root


def _in_place(fence: Fence, request: pytest.FixtureRequest) -> str:
    """Return the block with the addresses of the running servers."""
    text = fence.text
    for placeholders, name in (
        (("localhost:8000", "INSTANCE"), "server"),
        (("localhost:8001",), "pooling_server"),
    ):
        if any(word in text for word in placeholders):
            address = request.getfixturevalue(name).url.removeprefix("http://")
            text = re.sub("|".join(placeholders), address, text)
    return text


def _processes(
    fence: Fence, text: str, script: Path, environment: dict[str, str]
) -> Iterator[subprocess.CompletedProcess[str]]:
    """Run a block; what would import vLLM is forked from a process that has imported it."""
    lines = text.replace("\\\n", " ").splitlines()
    if fence.language == "python":
        script.write_text(text, encoding="utf-8")
        yield warm_process().run(environ=environment, script=script, timeout=120)
    elif all(re.fullmatch(r"(rbln-serve|vllm) [^|&;<>$]+", line) for line in lines):
        for program, *words in (shlex.split(line, comments=True) for line in lines):
            yield warm_process().run(
                *words, environ=environment, script=_PROGRAMS[program], timeout=120
            )
    else:
        shell = ["bash", "-euo", "pipefail", "-c", text]
        yield subprocess.run(
            shell, env=environment, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("fence", _RUNNING, ids=str)
def test_block_runs(
    fence: Fence,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    text = _in_place(fence, request)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    monkeypatch.chdir(folder)
    for done in _processes(fence, text, tmp_path / "block.py", environment):
        told = f"{fence}\n{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.returncode == 0, told
        assert not re.search(r'"error": ?\{', done.stdout), told


@pytest.mark.parametrize("fence", fences("json", "yaml"), ids=str)
def test_data_parses(fence: Fence) -> None:
    json.loads(fence.text) if fence.language == "json" else yaml.safe_load(fence.text)


def test_every_block_has_a_known_language() -> None:
    known = {"sh", "python", "json", "yaml", "promql", "ini", ""}
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md"))
    assert set(re.findall(r"^ *```(\w+)", text, re.MULTILINE)) <= known


@pytest.mark.parametrize("fence", fences(""), ids=str)
def test_a_block_without_language_is_no_command(fence: Fence) -> None:
    programs = ("rbln-serve", "make", "curl", "docker", "pip", "python", "helm", "kubectl", ".venv")
    assert not re.match(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(programs)}) ", fence.text) or (
        fence.text.startswith("rbln-serve cache: error:")
    )


@pytest.mark.parametrize("fence", _SHELL, ids=str)
def test_targets_and_programs_of_a_shell_block_exist(fence: Fence) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(fence):
        program = words[0].removeprefix(".venv/bin/")
        if program == "make":
            named = {word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)}
            assert named and named <= targets, words
        elif program == "python" and words[1] == "-m":
            assert find_spec(words[2]) is not None, words
        elif program == "python":
            assert (ROOT / words[1]).is_file(), words


@pytest.mark.slow
def test_flags_of_our_commands_exist() -> None:
    unknown = []
    for fence in _SHELL:
        for words in commands(fence):
            program = words[0].removeprefix(".venv/bin/")
            if program not in ("rbln-serve", "rbln-parity"):
                continue
            given = [word.partition("=")[0] for word in words if word.startswith("--")]
            if program == "rbln-parity":
                known = _help()
            else:
                name = " ".join(words[1 : 3 if words[1] in _NESTED else 2])
                known = _help(*name.split())
                known |= _help("serve", all_flags=True) if name in _WITH_VLLM_FLAGS else set()
            unknown += [f"{fence}: {words[1]} {flag}" for flag in given if flag not in known]
    assert unknown == []


@cache
def _help(*command: str, all_flags: bool = False) -> frozenset[str] | set[str]:
    """Return the flags in the help of `rbln-serve command`, of `rbln-parity` without a command."""
    script = None if command else ROOT / "rbln_backend" / "parity" / "command.py"
    words = (*command, "--help=all" if all_flags else "--help")
    done = warm_process().run(*words, environ=os.environ, script=script)
    assert done.returncode == 0, (command, done.stderr)
    return frozenset(re.findall(r"--[a-z][\w-]*", done.stdout))
