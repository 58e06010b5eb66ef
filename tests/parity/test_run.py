"""Tests of `rbln-parity` from its command line, with real sides in their processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from rbln_backend.parity.command import main
from tests.adapters import make_adapter
from tests.checkpoints import CheckpointCache
from tests.parity.broken_worker import BROKEN_LAYER
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

SMALL = ["--max-tokens", "6", "--max-batched", "32", "--max-model-len", "256", "--no-color"]


def _lines(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.wide
def test_a_broken_kernel_fails_the_run_and_its_layer_is_named(
    checkpoints: CheckpointCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"worker_cls": "tests.parity.broken_worker.BrokenWorker"}
    model = ["--model", str(checkpoints("llama", dtype="float32")), "--num-prompts", "1"]
    file = tmp_path / "r.jsonl"
    more = ["--reference", "transformers", "--bisect", "--rbln-args", json.dumps(broken)]
    # Limits of a float32 run; those of the command line suit bfloat16.
    limits = ["--dtype", "float32", "--max-mean-delta", "0.001", "--eps", "0.01"]
    assert main([*model, *SMALL, *more, *limits, "--json", str(file)]) == 1
    (verdict,) = _lines(file, "verdict")
    assert not verdict["passed"]
    assert verdict["departure"]["layer"] == BROKEN_LAYER
    # The layer before it is right to rounding.
    assert _lines(file, "layer")[0]["prefill"] < 1e-5
    assert f"FAIL {BROKEN_LAYER} departs" in capsys.readouterr().out


@pytest.mark.wide
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3_moe"])
def test_the_rbln_path_agrees_with_the_cpu_backend(
    family: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    model = ["--model", str(checkpoints(family, dtype="float32")), "--num-prompts", "2"]
    file = tmp_path / "r.jsonl"
    limits = ["--max-mean-delta", "0.001", "--eps", "0.01", "--min-pearson", "0.99999"]
    more = ["--transformers", "--bisect", "--batch", "2", "--dtype", "float32"]
    assert main([*model, *SMALL, "--json", str(file), *limits, *more]) == 0
    pairs = _lines(file, "pair")
    sides = [(pair["base"], pair["other"]) for pair in pairs]
    assert sides == [("cpu", "rbln"), ("transformers", "cpu"), ("transformers", "rbln")]
    assert all(pair["max_delta"] < 1e-3 for pair in pairs)
    assert [len(prompt["positions"]) for prompt in _lines(file, "prompt")] == [6] * 6
    assert _lines(file, "layer")
    assert _lines(file, "verdict")[0]["departure"] is None


@pytest.mark.wide
@pytest.mark.parametrize(("family", "more"), [("llama", []), ("qwen3_moe", ["--ep"])])
def test_data_parallel_ranks_agree_with_the_cpu_backend(
    family: str, more: list[str], checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """Five prompts on two ranks, two at a time, so one rank has fewer at the end."""
    model = ["--model", str(checkpoints(family, dtype="float32")), "--num-prompts", "5"]
    ranks = ["--dp", "2", "--batch", "2", "--dtype", "float32", *more]
    file = tmp_path / "r.json"
    assert main([*model, *SMALL, *ranks, "--max-mean-delta", "0.001", "--json", str(file)]) == 0
    (pair,) = _lines(file, "pair")
    assert [len(prompt["positions"]) for prompt in _lines(file, "prompt")] == [6] * 5
    assert pair["max_delta"] < 1e-3


@pytest.mark.wide
def test_both_sides_use_an_adapter(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama", dtype="float32")
    adapter = make_adapter(checkpoint, tmp_path / "adapter", seed=5, rank=8)
    model = ["--model", str(checkpoint), "--num-prompts", "2", "--dtype", "float32"]
    tokens = []
    for name, lora in (("plain", []), ("adapted", ["--lora", str(adapter)])):
        file = tmp_path / f"{name}.json"
        more = ["--json", str(file), "--max-mean-delta", "0.001", "--transformers"]
        assert main([*model, *SMALL, *more, *lora]) == 0
        assert all(pair["max_delta"] < 1e-3 for pair in _lines(file, "pair"))
        tokens.append([answer["token_ids"] for answer in _lines(file, "answer")])
    assert tokens[0] != tokens[1]


@pytest.mark.wide
def test_packed_weights_agree_with_the_cpu_backend_s(tmp_path: Path) -> None:
    """Use bfloat16, the only dtype of its kernels, and the limits of the command line."""
    recipe = Recipe(bits=4, group_size=64)
    checkpoint = make_quantized_checkpoint("llama", tmp_path / "model", recipe)
    model = ["--model", str(checkpoint), "--num-prompts", "2", "--dtype", "bfloat16"]
    assert main([*model, *SMALL]) == 0


@pytest.mark.wide
def test_every_side_has_fewer_layers(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    model = ["--model", str(checkpoints("gemma3_text", dtype="float32")), "--dtype", "float32"]
    tokens = []
    for count in ("1", "2"):
        file = tmp_path / f"{count}.json"
        more = ["--num-hidden-layers", count, "--transformers", "--json", str(file)]
        assert main([*model, *SMALL, *more, "--max-mean-delta", "0.001"]) == 0
        assert all(pair["max_delta"] < 1e-3 for pair in _lines(file, "pair"))
        tokens.append([answer["token_ids"] for answer in _lines(file, "answer")])
    assert tokens[0] != tokens[1]


@pytest.mark.wide
def test_a_reference_is_computed_once_with_use_cache(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(checkpoints("llama", dtype="float32")), "--num-prompts", "1"]
    cache = ["--use-cache", "--reference", "transformers"]
    assert main([*model, *SMALL, *cache]) == 0
    (kept,) = Path("cache").iterdir()
    written = kept.stat().st_mtime_ns
    assert "Launching TRANSFORMERS worker" in capsys.readouterr().out
    assert main([*model, *SMALL, *cache]) == 0
    printed = capsys.readouterr().out
    assert f"TRANSFORMERS results are the cached ones, {kept}" in printed
    assert "Launching TRANSFORMERS worker" not in printed
    assert kept.stat().st_mtime_ns == written
    assert main([*model, *SMALL, *cache, "--max-tokens", "5"]) == 0
    assert len(list(Path("cache").iterdir())) == 2


@pytest.mark.slow
def test_a_side_that_cannot_run_is_status_3_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The side exits before it imports the model's library."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    model = ["--model", str(tmp_path), "--num-hidden-layers", "1"]
    assert main([*model, "--reference", "transformers"]) == 3
    printed = capsys.readouterr()
    assert "the transformers side ended with status 1:\n" in printed.err
    assert f"ValueError: {tmp_path} holds no *.safetensors" in printed.err
    assert printed.out.startswith(f"Model = {tmp_path}, EP=False, TP=1,")
