"""The documented options, their defaults, and what they become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rbln_backend.errors import ConfigError
from rbln_backend.parity.jobs import Jobs, environ_of
from rbln_backend.parity.options import DEFAULT_PROMPTS, parse


def test_documented_defaults() -> None:
    options = parse([])
    assert (options.model, options.batch, options.max_tokens) == ("llama3.2-1b", 1, 256)
    assert (options.max_batched, options.max_model_len) == (128, 40960)
    assert (options.block_size_cpu, options.block_size_rbln) == (None, 8192)
    assert (options.logprobs, options.max_logprobs_cap, options.topk) == (1024, 128256, 5)
    assert options.prompts == DEFAULT_PROMPTS
    assert options.inspect_logits
    assert options.limits.eps == 0.5


def test_prompts_are_cut_or_repeated() -> None:
    assert parse(["--prompts", "a", "b", "c", "--num-prompts", "2"]).prompts == ("a", "b")
    assert parse(["--num-prompts", "6"]).prompts == (*DEFAULT_PROMPTS, *DEFAULT_PROMPTS[:2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1"),
        (["--logprobs", "-2"], "--logprobs must be"),
        (["--bisect", "--tp", "2"], "--bisect reads one rank's layers"),
        (["--bisect", "--dp", "2"], "--bisect reads one rank's layers"),
        (["--dp", "3", "--num-prompts", "2"], "--dp is 3, but there are 2 prompts"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--rbln-args", "[]"], "must be a JSON object"),
        (["--max-tok", "3"], "unrecognized arguments"),
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
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }
    jobs = Jobs(parse(["--model", _checkpoint(tmp_path, **fields), "--num-hidden-layers", "2"]))
    rbln, cpu = jobs.generate("rbln").engine_args, jobs.generate("cpu").engine_args
    assert (rbln["max_model_len"], rbln["block_size"]) == (500, 512)
    assert "block_size" not in cpu
    assert cpu["enforce_eager"]
    assert jobs.generate("cpu").num_logprobs == 300
    assert rbln["hf_overrides"] == {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    }


def test_expert_parallelism_needs_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ep needs a mixture of experts"):
        Jobs(parse(["--model", _checkpoint(tmp_path, vocab_size=8), "--ep"]))
    Jobs(parse(["--model", _checkpoint(tmp_path, num_local_experts=4), "--ep"]))


def test_the_reference_does_not_see_settings_of_this_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_RBLN_SUB_BLOCK_CACHE", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    cpu, rbln = environ_of("cpu"), environ_of("rbln")
    assert cpu["VLLM_PLUGINS"] == ""
    assert rbln["VLLM_PLUGINS"] == "rbln"
    assert "VLLM_RBLN_SUB_BLOCK_CACHE" not in cpu
    assert rbln["VLLM_RBLN_SUB_BLOCK_CACHE"] == "0"
    assert "VLLM_LOGGING_LEVEL" not in {**cpu, **rbln}
    assert cpu["VLLM_CACHE_ROOT"] == rbln["VLLM_CACHE_ROOT"] == "/somewhere"
