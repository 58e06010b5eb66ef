"""Every script of examples/ runs on the emulated device and shows what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters import make_adapter
from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.kernel_cache import share_kernels

FOLDER = ROOT / "examples"
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def run(name: str, *args: str) -> str:
    """Run a script as its users do; the log goes to standard error."""
    command = [sys.executable, str(FOLDER / name), *args]
    root = share_kernels(Path.home() / ".cache" / "rbln-serve" / "test-examples")
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(root), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=540
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.wide
def test_structured_output(checkpoints: CheckpointCache) -> None:
    out = run("structured_output.py", str(checkpoints("llama")))
    answers, _ = json.JSONDecoder().raw_decode(out, out.rindex("\n{\n") + 1)
    found = json.loads(answers["schema"])
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 120
    assert re.fullmatch(r"v\d\.\d{1,2}", answers["pattern"])
    assert answers["choice"] in ("yes", "no")


@pytest.mark.wide
def test_generate(checkpoints: CheckpointCache) -> None:
    assert "What are you?" in run("generate.py", str(checkpoints("llama")))


@pytest.mark.wide
def test_decode_buckets(checkpoints: CheckpointCache) -> None:
    out = run("decode_buckets.py", str(checkpoints("llama")))
    assert "compiled decode buckets: 1, 3, 8" in out
    assert "2 requests ran in decode-3, 1 rows were padding" in out


@pytest.mark.wide
def test_prefix_caching(checkpoints: CheckpointCache) -> None:
    out = run("prefix_caching.py", str(checkpoints("llama", max_position_embeddings=2048)))
    reused = [int(n) for n in re.findall(r"(\d+) of them reused", out)]
    assert reused[0] == 0
    assert min(reused[1:]) > 32


@pytest.mark.wide
def test_lora(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama")
    for number, name in enumerate(("one", "two")):
        make_adapter(checkpoint, tmp_path / name, seed=number)
    out = run("lora.py", str(checkpoint), str(tmp_path / "one"), str(tmp_path / "two"))
    answers = re.findall(r"^(the model itself|one|two): (.*)$", out, re.MULTILINE)
    assert [name for name, _ in answers] == ["the model itself", "one", "two"]
    assert len({text for _, text in answers}) == 3


@pytest.mark.wide
def test_mixture_of_experts(checkpoints: CheckpointCache) -> None:
    checkpoint = str(checkpoints("qwen3_moe", dtype="float32"))
    exact = (checkpoint, "--dtype", "float32")
    one = run("mixture_of_experts.py", *exact, "--tensor-parallel-size", "1")
    two = run("mixture_of_experts.py", *exact)
    tokens = [re.findall(r"\[\d[\d, ]*\]", out)[-1] for out in (one, two)]
    assert tokens[0] == tokens[1]


def test_the_page_names_every_script() -> None:
    page = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE)) == {
        path.name for path in FOLDER.glob("*.py")
    }
