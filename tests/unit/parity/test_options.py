"""The documented options, their defaults, and what they become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rbln_backend.errors import ConfigError
from rbln_backend.parity.jobs import Jobs, environ_of
from rbln_backend.parity.options import DEFAULT_PROMPTS, parse
from tests.unit.parity.conftest import Hub


def test_documented_defaults() -> None:
    options = parse([])
    assert (options.model, options.batch, options.max_tokens) == ("llama3.2-1b", 1, 256)
    assert (options.max_batched, options.max_model_len) == (128, 40960)
    assert (options.block_size_cpu, options.block_size_rbln) == (128, 8192)
    assert (options.logprobs, options.max_logprobs_cap, options.topk) == (1024, 128256, 5)
    assert options.prompts == ("Hello, my name is",)
    assert options.inspect_logits
    assert options.limits.eps == 0.5


def test_prompts_are_cut_or_repeated() -> None:
    assert parse(["--prompts", "a", "b", "c", "--num-prompts", "2"]).prompts == ("a", "b")
    assert parse(["--num-prompts", "6"]).prompts == (*DEFAULT_PROMPTS, *DEFAULT_PROMPTS[:2])
    assert parse(["--dp", "2"]).prompts == DEFAULT_PROMPTS[:2]


@pytest.mark.parametrize("flag", ["--block", "--block-size", "--block-size-rbln"])
def test_documented_names_of_the_block_size(flag: str) -> None:
    options = parse([flag, "4096"])
    assert (options.block_size_cpu, options.block_size_rbln) == (128, 4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch: must be at least 1, got 0"),
        (["--block", "0"], "--block: must be at least 1, got 0"),
        (["--logprobs", "-2"], "--logprobs must be"),
        (["--bisect", "--tp", "2"], "--bisect reads one rank's layers"),
        (["--bisect", "--dp", "2"], "--bisect reads one rank's layers"),
        (["--dp", "3", "--num-prompts", "2"], "--dp is 3, but there are 2 prompts"),
        (["--num-hidden-layers", "0"], "--num-hidden-layers: must be at least 1, got 0"),
        (["--num-prompts", "0"], "--num-prompts: must be at least 1, got 0"),
        (["--num-prompts", "0", "--prompts", "a"], "--num-prompts: must be at least 1, got 0"),
        (["--rbln-args", "[]"], "must be a JSON object"),
        (["--max-tok", "3"], "unknown argument --max-tok; did you mean --max-tokens?"),
    ],
)
def test_wrong_arguments_are_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def _checkpoint(folder: Path, **fields: object) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_engine_arguments_fit_the_model(tmp_path: Path) -> None:
    fields = {
        "max_position_embeddings": 500,
        "vocab_size": 300,
    }
    jobs = Jobs(parse(["--model", _checkpoint(tmp_path, **fields)]))
    rbln, cpu = jobs.generate("rbln").engine_args, jobs.generate("cpu").engine_args
    assert (rbln["max_model_len"], rbln["block_size"]) == (500, 512)
    assert (cpu["max_model_len"], cpu["block_size"], cpu["enforce_eager"]) == (500, 128, True)
    assert jobs.generate("cpu").num_logprobs == 300


def test_what_is_less_than_requested_is_reported(tmp_path: Path) -> None:
    model = ["--model", _checkpoint(tmp_path, max_position_embeddings=500, vocab_size=300)]
    context, block, cap, vocabulary = Jobs(parse([*model, "--max-logprobs-cap", "400"])).clamped
    assert context.startswith("--max-model-len 40960 is more than the model's context, 500,")
    assert block.startswith("--block-size-rbln 8192 is more than the longest request, 512,")
    assert cap.startswith("--logprobs 1024 is more than --max-logprobs-cap, 400,")
    assert vocabulary.startswith("--logprobs 400 is more than the vocabulary, 300,")
    fitting = ["--max-model-len", "256", "--block", "256", "--logprobs", "300"]
    assert Jobs(parse([*model, *fitting])).clamped == []
    whole = Jobs(parse([*model, *fitting[:4], "--logprobs", "-1"]))
    assert (whole.clamped, whole.generate("cpu").num_logprobs) == ([], -1)


def test_a_name_of_the_hub_has_its_limits_too(hub: Hub) -> None:
    hub.add("meta-llama/Meta-Llama-3-8B", max_position_embeddings=8192, vocab_size=128256)
    jobs = Jobs(parse(["--model", "llama3-8b"]))
    assert jobs.model == "meta-llama/Meta-Llama-3-8B"
    assert jobs.generate("cpu").engine_args["max_model_len"] == 8192
    assert len(jobs.clamped) == 1
    # Nothing is known of this one before its sides have it.
    assert Jobs(parse(["--model", "qwen3-1.7b"])).clamped == []


def test_expert_parallelism_needs_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ep needs a mixture of experts"):
        Jobs(parse(["--model", _checkpoint(tmp_path, vocab_size=8), "--ep"]))
    Jobs(parse(["--model", _checkpoint(tmp_path, num_local_experts=4), "--ep"]))


def test_sides_have_the_documented_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_RBLN_SUB_BLOCK_CACHE", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    monkeypatch.setenv("RBLN_KERNEL_MODE", "triton")
    cpu, rbln = environ_of("cpu"), environ_of("rbln")
    assert cpu["VLLM_PLUGINS"] == "cpu"
    assert "VLLM_PLUGINS" not in rbln
    assert rbln["VLLM_DISABLE_COMPILE_CACHE"] == "1"
    assert rbln["RBLN_KERNEL_MODE"] == "triton"
    assert "RBLN_KERNEL_MODE" not in cpu
    assert "VLLM_RBLN_SUB_BLOCK_CACHE" not in cpu
    assert rbln["VLLM_RBLN_SUB_BLOCK_CACHE"] == "0"
    assert "VLLM_LOGGING_LEVEL" not in {**cpu, **rbln}
    assert cpu["VLLM_CACHE_ROOT"] == rbln["VLLM_CACHE_ROOT"] == "/somewhere"
