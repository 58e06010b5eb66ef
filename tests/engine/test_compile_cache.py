"""A second start compiles nothing, and no state of the disk leads to a crash or a wrong token."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from rbln_backend.errors import UncompiledShapeError
from rbln_backend.graphs.bundles import collect, write_folder
from rbln_backend.graphs.cache import MANIFEST, PROGRAM, encode_manifest, read_manifest
from server.commands.cache import GraphChecks
from server.commands.cli import main
from tests.checkpoints import CheckpointCache
from tests.engine.conftest import DEFAULTS, Engine, Engines
from tests.engine.support import FEW, make_prompts
from tests.forged_bundles import CANARY, CODE, Watch, forge, import_forged
from tests.kernel_cache import share_kernels
from tests.reference import reference_generate
from tests.warm_process import warm_process

pytestmark = pytest.mark.engine

# prefill 16, 32, 64; decode 1, 2, 4; the LM head. Of one layer, as each is captured often.
NUM_GRAPHS = 7
# Of the options FEW: prefill 64; decode 1, 4; the LM head.
FEW_GRAPHS = 4
ONE_LAYER = {"num_hidden_layers": 1}
PROMPT = make_prompts([70], seed=200)[0]


@pytest.fixture(scope="module")
def filled(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root with every graph in it; tests copy it."""
    root = tmp_path_factory.mktemp("filled")
    engine = start(engines, root)
    assert compiled(engine) == NUM_GRAPHS
    return root


def start(
    engines: Engines, root: Path, arch: str = "llama", *, options: Any = None, **rbln: Any
) -> Engine:
    checkpoint = engines.checkpoints(arch, **ONE_LAYER)
    rbln = {"cache_root": str(root), **rbln}
    return engines.fresh(checkpoint=checkpoint, rbln=rbln, **(options or {}))


def compiled(engine: Engine) -> int:
    return int(engine.total("rbln_compile_seconds_count", result="compiled"))


def loaded(engine: Engine) -> int:
    return int(engine.total("rbln_compile_seconds_count", result="loaded"))


def assert_serves(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,) = engine.generate([PROMPT], params)
    expected = reference_generate(engine.checkpoint, PROMPT, 8).token_ids
    assert list(output.outputs[0].token_ids) == expected


def graph_files(root: Path) -> list[Path]:
    graphs = root / "rbln" / "graphs"
    kept = ("locks", "tmp", "quarantine")
    return sorted(
        path
        for path in graphs.rglob("*")
        if path.is_file() and path.relative_to(graphs).parts[0] not in kept
    )


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    """The filled cache under another path, as after a copy to another machine."""
    return Path(shutil.copytree(filled, tmp_path / "copied", symlinks=True))


def test_a_warm_start_compiles_nothing(engines: Engines, copied: Path) -> None:
    engine = start(engines, copied)
    assert compiled(engine) == 0
    assert loaded(engine) == NUM_GRAPHS
    assert engine.metric("rbln_compile_cache_requests_total", result="hit") == NUM_GRAPHS
    assert_serves(engine)


def test_an_exported_folder_is_read_in_place(
    engines: Engines, filled: Path, tmp_path: Path
) -> None:
    """Beside a root that has none of it; nothing is written to either but what is new."""
    bundle, root = tmp_path / "bundle", tmp_path / "root"
    write_folder(bundle, collect(filled, GraphChecks(), kernel_keys=()))
    before = {path: path.read_bytes() for path in graph_files(bundle)}
    engine = start(engines, root, cache_bundles=[str(bundle)])
    assert (compiled(engine), loaded(engine)) == (0, NUM_GRAPHS)
    assert graph_files(root) == []
    assert {path: path.read_bytes() for path in graph_files(bundle)} == before
    assert_serves(engine)


def test_damaged_files_are_rebuilt(
    engines: Engines, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry is damaged in another way: flipped bits, a cut, an empty file, a missing one.

    One is whole, and its program would run code if its names became source text.
    """
    monkeypatch.chdir(tmp_path)
    files = graph_files(copied)
    entries = sorted({path.parent for path in files})
    assert len(entries) == NUM_GRAPHS
    for number, entry in enumerate(entries):
        program, manifest = entry / "program.json", entry / "manifest.json"
        if number == 0:
            flip(program, at=100)
        elif number == 1:
            flip(manifest, at=30)
        elif number == 2:
            program.write_bytes(program.read_bytes()[:-10])
        elif number == 3:
            manifest.write_bytes(b"")
        elif number == 4:
            program.unlink()
        elif number == 5:
            forge_keyword(entry)
        else:
            manifest.unlink()
    assert main(["cache", "verify", "--cache-root", str(copied)]) == 1
    engine = start(engines, copied)
    assert compiled(engine) == NUM_GRAPHS
    assert engine.metric("rbln_compile_cache_requests_total", result="corrupt") == NUM_GRAPHS
    assert_serves(engine)
    assert not (tmp_path / CANARY).exists()
    again = start(engines, copied)
    assert compiled(again) == 0
    assert_serves(again)


def test_a_forged_bundle_is_refused_or_valid(filled: Path, tmp_path: Path) -> None:
    """Nothing of one is executed; ``python -m tests.forged_bundles`` tries many more."""
    files = collect(filled, GraphChecks(), kernel_keys=()).to_files()
    watch = Watch()
    watch.prepare(files, tmp_path / "bundle")
    accepted = [
        import_forged(forge(random.Random(seed), files), tmp_path / "bundle", watch)
        for seed in range(150)
    ]
    assert 0 < sum(accepted) < 50


def forge_keyword(entry: Path) -> None:
    """Change a program, and its manifest with it."""
    document = json.loads((entry / PROGRAM).read_bytes())
    call = next(node for node in document["nodes"] if "::" in node["op"])
    call["kwargs"] = {f"**({CODE} and {{}} or {{}}))  #": None}
    data = json.dumps(document, separators=(",", ":")).encode()
    key = read_manifest(entry).key
    (entry / PROGRAM).write_bytes(data)
    (entry / MANIFEST).write_bytes(encode_manifest(key, {PROGRAM: data}, created=0))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def test_another_shape_is_another_key(engines: Engines, copied: Path) -> None:
    engine = start(engines, copied, options={"max_num_seqs": 2})
    # The decode graphs of 1 and 2 rows and the rest are shared, but for the chunk of 64, which
    # held four prompts.
    assert compiled(engine) == 1
    other = start(engines, copied, options={"block_size": 32}, **FEW)
    # The LM head does not depend on the block size, but the key is the whole configuration.
    assert compiled(other) == FEW_GRAPHS


def test_another_model_never_reads_these_graphs(engines: Engines, copied: Path) -> None:
    assert compiled(start(engines, copied, "qwen2", **FEW)) == FEW_GRAPHS


def test_a_read_only_store_serves_and_is_left_alone(engines: Engines, copied: Path) -> None:
    before = {path: path.read_bytes() for path in graph_files(copied)}
    engine = start(engines, copied, cache_read_only=True)
    assert compiled(engine) == 0
    assert_serves(engine)
    assert {path: path.read_bytes() for path in graph_files(copied)} == before


def test_the_cache_can_be_bypassed(engines: Engines, copied: Path) -> None:
    engine = start(engines, copied, disable_compile_cache=True, **FEW)
    assert compiled(engine) == FEW_GRAPHS
    assert engine.total("rbln_compile_cache_requests_total", result="hit") == 0
    assert_serves(engine)


def test_without_warm_up_the_first_request_compiles(engines: Engines, copied: Path) -> None:
    engine = start(engines, copied, enable_warm_up=False)
    assert loaded(engine) == 0
    assert_serves(engine)
    assert engine.total("rbln_recompiles_after_warmup_total") == 0


def test_manual_buckets_are_the_graphs(engines: Engines, tmp_path: Path) -> None:
    engine = start(
        engines,
        tmp_path,
        decode_batch_bucket_strategy="manual",
        decode_batch_bucket_manual_buckets=[3, 4],
        prefill_chunk_buckets=[64],
    )
    assert compiled(engine) == 4
    assert_serves(engine)
    assert engine.total("rbln_bucket_steps_total", phase="decode", bucket="3") > 0


def test_an_unknown_shape_after_warm_up_is_refused_and_counted(
    engines: Engines, copied: Path
) -> None:
    engine = start(engines, copied)
    runner = engine.core.model_executor.driver_worker.worker._runner
    runner._graphs.dispatch._graphs.clear()
    with pytest.raises(UncompiledShapeError, match="was not compiled at warm-up"):
        assert_serves(engine)
    assert engine.total("rbln_recompiles_after_warmup_total") == 1


# --------------------------------------------------------------------------------- store contention
START = """
import json, sys
from vllm import LLM

path, options = json.loads(sys.argv[1])
LLM(path, **options)
"""


@pytest.mark.slow
def test_two_starts_share_the_work(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    root = share_kernels(tmp_path / "cache")
    script = tmp_path / "start.py"
    script.write_text(START)
    environment = dict(os.environ) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    processes = []
    for number in range(2):
        run_dir = tmp_path / f"run-{number}"
        run_dir.mkdir()
        rbln = {"cache_root": str(root), "run_dir": str(run_dir), "num_threads": 1} | FEW
        options = DEFAULTS | {"additional_config": {"rbln": rbln}}
        argument = json.dumps([str(checkpoints("llama", **ONE_LAYER)), options])
        with (run_dir / "log").open("wb") as log:
            process = warm_process().start(
                argument, environ=environment, output=log, errors=log, script=script
            )
        processes.append((process, run_dir / "log"))
    for process, log_file in processes:
        assert process.wait(180) == 0, log_file.read_text()[-2000:]
    results = [result for number in range(2) for result in _results(tmp_path / f"run-{number}")]
    assert sorted(results) == ["compiled"] * FEW_GRAPHS + ["loaded"] * FEW_GRAPHS


def _results(run_dir: Path) -> list[str]:
    """Return "compiled" or "loaded" by graph, from the progress file of rank 0."""
    lines = (run_dir / "progress-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["result"] for event in events if event["event"] == "graph_done"]
