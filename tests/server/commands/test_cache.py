"""`rbln-serve cache` over a root with graphs and a library: what operators and scripts see."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rbln_backend.graphs.bundles import collect, write_bundle
from rbln_backend.graphs.cache import ArtifactStore, CacheKey, graph_store, sources_digest
from rbln_backend.graphs.kernel_files import LIBRARY, RECORD, kernel_store, make_record, publish
from rbln_backend.graphs.program import write_document
from server.commands.cli import main

FIELDS = {"architecture": "LlamaForCausalLM", "phase": "decode"}
KEYS = [
    CacheKey({**FIELDS, "bucket": size, "backend_sources": sources_digest()}) for size in (1, 2, 4)
]
OTHER = CacheKey({**FIELDS, "bucket": 1, "backend_sources": "of another version"})
# About 1 KB.
PROGRAM = write_document(
    ["input:x"] * 25,
    [{"op": "placeholder"}] * 25 + [{"op": "output", "args": {"tuple": [[{"node": 0}]]}}],
)
KERNEL = "0123456789abcdef" * 2
DAY_S = 86400.0
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    store = ArtifactStore(graph_store(root), max_bytes=1 << 30, on_event=lambda _: None)
    for key in KEYS:
        store.store(key, {"program.json": PROGRAM})
    library = b"\x7fELF code"
    files = {LIBRARY: library, RECORD: make_record(library, "avx2")}
    publish(kernel_store(root) / KERNEL, files)
    return root


def entry(root: Path, key: CacheKey) -> Path:
    return graph_store(root) / key.digest[:2] / key.digest


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    # An engine of this process has sent our logs to the standard output.
    monkeypatch.setattr(logging.getLogger("rbln_backend"), "handlers", [])

    def run(*words: str | Path) -> tuple[int, str, str]:
        code = main(["cache", *map(str, words)])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_a_setting_that_is_wrong_is_one_line(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RBLN_CACHE_MAX_BYTES", "x")
    with pytest.raises(SystemExit) as ended:
        run("list")
    assert ended.value.code == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "rbln-serve cache: error: Invalid VLLM_RBLN_CACHE_MAX_BYTES: x, must be a valid integer"
    )


def test_what_is_exported_is_imported_once(run: Run, root: Path, tmp_path: Path) -> None:
    bundle, new = tmp_path / "b.tar", tmp_path / "new"
    code, out, err = run("export", bundle, "--cache-root", root)
    digest, name = out.split()
    assert (code, name, err) == (0, str(bundle), "3 graphs, 1 kernel libraries\n")
    folder = tmp_path / "folder"
    assert run("export", "--directory", folder, "--cache-root", root)[1].split()[0] == digest
    code, out, _ = run("import", bundle, "--digest", digest, "--cache-root", new)
    assert code == 0
    assert out.splitlines() == [
        f"3 graphs imported into {new}, 0 were there",
        "1 kernel libraries imported, 0 were there",
    ]
    code, out, _ = run("import", folder, "--digest", digest, "--cache-root", new)
    assert (code, out.splitlines()[0]) == (0, f"0 graphs imported into {new}, 3 were there")
    listed = json.loads(run("list", "--json", "--cache-root", new)[1])
    assert {graph["key"] for graph in listed["graphs"]} == {key.digest for key in KEYS}
    assert listed["kernels"][0]["target"] == "avx2"


def test_what_others_could_have_written_is_not_exported(
    run: Run, root: Path, tmp_path: Path
) -> None:
    """A bundle's digest would vouch for it."""
    root.chmod(0o2775)
    bundle = tmp_path / "b.tar"
    code, _, err = run("export", bundle, "--cache-root", root)
    assert code == 1
    assert f"{KERNEL} is not exported: others may write {root} (mode 2775)" in err
    assert not bundle.exists()
    code, _, err = run("export", bundle, "--cache-root", root, "--no-kernels")
    assert (code, err) == (0, "3 graphs, 0 kernel libraries\n")


def test_an_import_says_that_others_may_write_there(run: Run, root: Path, tmp_path: Path) -> None:
    bundle, shared = tmp_path / "b.tar", tmp_path / "shared"
    digest = run("export", bundle, "--cache-root", root)[1].split()[0]
    shared.mkdir()
    shared.chmod(0o2775)
    code, out, _ = run("import", bundle, "--digest", digest, "--cache-root", shared)
    assert code == 0
    assert out.splitlines()[-1] == (
        f"servers will not run them: others may write {shared} (mode 2775)"
    )


def test_another_digest_is_refused_and_nothing_written(
    run: Run, root: Path, tmp_path: Path
) -> None:
    bundle, new = tmp_path / "b.tar", tmp_path / "new"
    run("export", bundle, "--cache-root", root)
    code, _, err = run("import", bundle, "--digest", f"sha256:{'0' * 64}", "--cache-root", new)
    assert code == 1
    assert f"not sha256:{'0' * 64}" in err
    assert not new.exists()


def test_code_is_left_out_unless_trusted(run: Run, root: Path, tmp_path: Path) -> None:
    bundle, new = tmp_path / "b.tar", tmp_path / "new"
    run("export", bundle, "--cache-root", root)
    code, out, _ = run("import", bundle, "--cache-root", new)
    assert (code, kernel_store(new).exists()) == (0, False)
    assert "1 kernel libraries left out: they are code; --digest or --trust-kernels" in out
    run("import", bundle, "--trust-kernels", "--cache-root", new)
    assert (kernel_store(new) / KERNEL / LIBRARY).exists()


def test_an_empty_root_is_not_exported(run: Run, tmp_path: Path) -> None:
    code, _, err = run("export", tmp_path / "b.tar", "--cache-root", tmp_path / "typo")
    assert code == 1
    assert f"nothing is stored in {tmp_path / 'typo'}" in err
    assert not (tmp_path / "b.tar").exists()


def test_damage_is_found_and_moved_away(run: Run, root: Path) -> None:
    (entry(root, KEYS[0]) / "program.json").write_bytes(b"y")
    (kernel_store(root) / KERNEL / LIBRARY).write_bytes(b"y")
    code, out, _ = run("verify", "--cache-root", root)
    assert code == 1
    assert out.splitlines()[-1] == "2 entries are whole, 2 damaged"
    code, out, _ = run("verify", "--quarantine", "--json", "--cache-root", root)
    assert (code, {item["key"] for item in json.loads(out)["damaged"]}) == (
        1,
        {KEYS[0].digest, KERNEL},
    )
    assert run("verify", "--cache-root", root)[:2] == (0, "2 entries are whole, 0 damaged\n")


def test_a_graph_that_a_start_would_not_run_is_neither_whole_nor_moved(
    run: Run, root: Path, tmp_path: Path
) -> None:
    """Its size and digest are right; for another version's nothing else can be checked."""
    forged = PROGRAM.replace(b'{"node":0}', b'{"node":-1}')
    store = ArtifactStore(graph_store(root), max_bytes=1 << 30, on_event=lambda _: None)
    store.evict(KEYS[0].digest)
    store.store(OTHER, {"program.json": forged})
    code, out, _ = run("verify", "--cache-root", root)
    assert (code, out.splitlines()) == (
        0,
        [
            "4 entries are whole, 0 damaged",
            "1 graphs of other versions: only sizes and digests were checked, this version does "
            "not load them",
        ],
    )
    assert json.loads(run("verify", "--json", "--cache-root", root)[1])["of_other_versions"] == 1
    store.store(KEYS[0], {"program.json": forged})
    code, out, _ = run("verify", "--cache-root", root)
    reason = "node 25 of the program: -1 is not the number of an earlier node"
    assert (code, out.splitlines()[0]) == (1, f"damaged graph {KEYS[0].digest}: {reason}")
    bundle, new = tmp_path / "b.tar", tmp_path / "new"
    code, _, err = run("export", bundle, "--cache-root", root)
    assert (code, bundle.exists()) == (1, False)
    assert f"graph {KEYS[0].digest} is not exported: {reason}" in err
    write_bundle(bundle, collect(root, lambda *_: None))
    code, _, err = run("import", bundle, "--cache-root", new)
    assert (code, new.exists()) == (1, False)
    assert err == f"rbln-serve cache: error: graph {KEYS[0].digest}: {reason}\n"


def test_names_from_a_bundle_control_no_terminal(run: Run, root: Path) -> None:
    store = ArtifactStore(graph_store(root), max_bytes=1 << 30, on_event=lambda _: None)
    forged = CacheKey(
        {"architecture": "\x1b[2J\nLlama" + "x" * 500, "phase": "\x1b[H", "bucket": 1}
    )
    store.store(forged, {"program.json": PROGRAM})
    library = b"\x7fELF other"
    files = {LIBRARY: library, RECORD: make_record(library, "\x1b[31mavx2")}
    publish(kernel_store(root) / KERNEL[::-1], files)
    for words in (("list",), ("prune", "--keep-days", "0", "--dry-run")):
        out = run(*words, "--cache-root", root)[1]
        assert "\x1b" not in out
        assert "?[H-1" in out
        assert "for ?[31mavx2" in out
        assert max(map(len, out.splitlines())) < 200


def test_pruning_takes_what_is_unused_longest(run: Run, root: Path) -> None:
    for days, key in enumerate(KEYS, start=1):
        manifest = entry(root, key) / "manifest.json"
        used = manifest.stat().st_mtime - days * DAY_S
        os.utime(manifest, (used, used))
        os.utime(entry(root, key), (used, used))
    code, out, _ = run("prune", "--keep-days", "2.5", "--dry-run", "--cache-root", root)
    assert (code, out.splitlines()[0]) == (0, f"would remove {KEYS[2].digest} decode-4")
    assert len(out.splitlines()) == 2
    run("prune", "--max-bytes", "3K", "--cache-root", root)
    left = json.loads(run("list", "--json", "--cache-root", root)[1])["graphs"]
    assert [graph["graph"] for graph in left] == ["decode-2", "decode-1"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["prune"], "one of --keep-days, --max-bytes and --other-versions"),
        (["import", "x.tar", "--digest", "sha256:short"], "64 hexadecimal digits"),
        (["prune", "--max-bytes", "2 lots"], "must be a size such as 500M"),
        (["list", "more"], "unknown argument more"),
        (["inspect"], "--model"),
    ],
)
def test_wrong_command_lines_end_with_2(
    run: Run, capfd: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    try:
        code, _, err = run(*words)
    except SystemExit as end:
        code, err = end.code, capfd.readouterr().err
    assert code == 2
    assert reason in err


@pytest.mark.slow
def test_without_our_platform(root: Path) -> None:
    words = ("prune", "--other-versions", "--dry-run", "--cache-root", str(root))
    done = subprocess.run(
        [sys.executable, "-m", "server", "cache", *words],
        env={**os.environ, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "not on the RBLN platform; see VLLM_PLUGINS" in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------------------------------- published
ROOT = Path(__file__).parents[3]


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.timeout(1200)
def test_verdicts_are_those_of_today() -> None:
    done = subprocess.run(
        [sys.executable, "docs/published.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run `make published`\n{done.stdout}{done.stderr}"
