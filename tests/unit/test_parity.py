"""The documented options, their defaults, and what they become."""

from __future__ import annotations

import json
import math
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rbln_backend.errors import ConfigError
from rbln_backend.parity.jobs import Answer, Job, Jobs, Layers, SideResult, get_environ
from rbln_backend.parity.layers import first_layers
from rbln_backend.parity.options import DEFAULT_PROMPTS, Limits, parse
from rbln_backend.parity.report import json_lines, text_report
from rbln_backend.parity.run import (
    Comparison,
    LayerDelta,
    Outcome,
    compare,
    compare_position,
    first_departure,
    heading,
    judge,
    launch,
    layer_deltas,
)
from rbln_backend.parity.transformers_side import add_adapter, plain_checkpoint, read_weights
from tests.adapters import make_adapter, merge
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint


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
    fields = {"max_position_embeddings": 500, "vocab_size": 300}
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


def test_sides_have_the_documented_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = """VLLM_RBLN_SUB_BLOCK_CACHE=0 VLLM_LOGGING_LEVEL=DEBUG VLLM_PLUGINS=another
    VLLM_CACHE_ROOT=/somewhere RBLN_KERNEL_MODE=triton"""
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    cpu, rbln = get_environ("cpu"), get_environ("rbln")
    assert cpu["VLLM_PLUGINS"] == "cpu"
    assert "VLLM_PLUGINS" not in rbln
    assert rbln["VLLM_DISABLE_COMPILE_CACHE"] == "1"
    assert rbln["RBLN_KERNEL_MODE"] == "triton"
    assert "RBLN_KERNEL_MODE" not in cpu
    assert "VLLM_RBLN_SUB_BLOCK_CACHE" not in cpu
    assert rbln["VLLM_RBLN_SUB_BLOCK_CACHE"] == "0"
    assert "VLLM_LOGGING_LEVEL" not in {**cpu, **rbln}
    assert cpu["VLLM_CACHE_ROOT"] == rbln["VLLM_CACHE_ROOT"] == "/somewhere"


# --------------------------------------------------------------------------------------------- text
OPTIONS = parse(["--no-color", "--topk", "2"])


def _answer(tokens: list[int], top: list[list[int]], values: list[list[float]]) -> Answer:
    ids = {"prompt_ids": np.array([1]), "token_ids": np.array(tokens), "top_ids": np.array(top)}
    return Answer(text="", logprobs=np.array(values, dtype=np.float32), **ids)


CPU = _answer([7], [[7, 8, 9]], [[-0.5, -1.0, -1.25]])
# The second and the third have changed places.
RBLN = _answer([7], [[7, 9, 8]], [[-0.5, -1.0, -1.125]])


RESULTS = {
    side: SideResult(answers=(answer,), seconds=1.0, about={"vocab_size": 4321})
    for side, answer in (("cpu", CPU), ("rbln", RBLN))
}
PAIR = Comparison(base="cpu", other="rbln", deltas=(compare(CPU, RBLN, 0.5),))
OUTCOME = Outcome(
    options=OPTIONS, results=RESULTS, pairs=(PAIR,), failures=(), clamped=("--topk is 2",)
)


def test_the_heading_and_a_sides_environment_are_printed() -> None:
    options = parse(["--ep", "--tp", "4", "--num-prompts", "3"])
    assert heading(options, "some-org/some-model") == (
        "Model = some-org/some-model, EP=True, TP=4, PP=1, DP=1, MaxTokens=256, Logprobs=1024, "
        "Prompts=3"
    )
    cpu = "\n".join(launch("cpu", {"VLLM_PLUGINS": "cpu"}))
    assert cpu == "\n[main] Launching CPU worker…\n[cpu] VLLM_PLUGINS = cpu"
    rbln = list(launch("rbln", {"VLLM_DISABLE_COMPILE_CACHE": "1"}))
    assert "[rbln] VLLM_PLUGINS = <unset>" in rbln
    assert "[rbln] VLLM_DISABLE_COMPILE_CACHE = 1" in rbln


def test_each_side_is_ranked_by_itself() -> None:
    lines = text_report(OUTCOME).splitlines()
    assert any(line.split() == ["vocabulary", "size", "4321"] for line in lines)
    ranks = [line.split() for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert ranks == [
        ["1", "7", "-0.500000", "7", "-0.500000"],
        ["2", "9", "-1.000000", "8", "-1.000000"],
    ]


def test_programs_get_a_json_object_a_line() -> None:
    lines = [json.loads(line) for line in json_lines(OUTCOME).splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["run", "side", "answer", "side", "answer", "prompt", "pair", "verdict"]
    run, cpu, cpu_answer, _, rbln_answer, prompt, pair, verdict = lines
    assert run["clamped"] == ["--topk is 2"]
    assert cpu["about"]["vocab_size"] == 4321
    assert cpu_answer["ranking"] == [[7, -0.5], [8, -1.0]]
    assert rbln_answer["ranking"] == [[7, -0.5], [9, -1.0]]
    assert prompt["positions"][0]["max_delta"] == pair["max_delta"] == 0.25
    assert verdict == {"kind": "verdict", "passed": True, "failures": [], "departure": None}


# ---------------------------------------------------------------------------------------- positions
LIMITS = Limits(eps=0.5, min_pearson=0.99, max_mean_delta=0.1, max_outlier_share=0.01)


def _position(ref: dict[int, float], other: dict[int, float], eps: float = 0.5):
    return compare_position(
        np.array(list(ref)), np.array(list(ref.values()), dtype=np.float32),
        np.array(list(other)), np.array(list(other.values()), dtype=np.float32), eps,
    )  # fmt: skip


def test_only_tokens_of_both_sides_with_finite_values_are_compared() -> None:
    inf = float("-inf")
    position = _position({7: -0.5, 3: -1.0, 9: inf, 4: -3.0}, {3: -1.5, 7: -0.4, 9: -2.0, 8: -4.0})
    assert position.overlap == 2
    assert position.outliers == 1
    assert position.max_delta == pytest.approx(0.5)
    assert position.mean_delta == pytest.approx(0.3)
    assert position.margin == pytest.approx(0.5)
    assert not position.same_best


def test_pearson_is_nan_where_it_is_not_defined() -> None:
    assert math.isnan(_position({1: -1.0}, {1: -1.0}).pearson)
    assert math.isnan(_position({1: -1.0, 2: -1.0}, {1: -1.0, 2: -2.0}).pearson)
    assert _position({1: -1.0, 2: -2.0}, {1: -1.5, 2: -2.5}).pearson == pytest.approx(1.0)


def test_equal_answers_pass() -> None:
    answer = _answer([5, 6], [[5, 1], [6, 1]], [[-0.1, -3.0], [-0.2, -3.0]])
    delta = compare(answer, answer, 0.5)
    assert delta.first_divergence is None
    assert judge([delta], LIMITS) == []


def test_another_token_fails_unless_the_reference_was_undecided() -> None:
    decided = _answer([5, 6], [[5, 1], [6, 1]], [[-0.1, -3.0], [-0.2, -3.0]])
    away = _answer([5, 1], [[5, 1], [6, 1]], [[-0.1, -3.0], [-0.25, -3.0]])
    (failure,) = judge([compare(decided, away, 0.5)], LIMITS)
    assert (failure.prompt, failure.position) == (0, 1)
    assert "another token" in failure.reason
    tie = _answer([5, 6], [[5, 1, 2], [6, 1, 2]], [[-0.1, -3.0, -9.0], [-0.70, -0.71, -9.0]])
    other = _answer([5, 1], [[5, 1, 2], [1, 6, 2]], [[-0.1, -3.0, -9.0], [-0.70, -0.72, -9.0]])
    delta = compare(tie, other, 0.5)
    assert delta.divergence_is_a_tie
    assert judge([delta], LIMITS) == []


def test_without_logprobs_a_divergence_fails() -> None:
    nothing: list[list[int]] = [[], []]
    delta = compare(_answer([5, 6], nothing, nothing), _answer([5, 7], nothing, nothing), 0.5)
    assert [str(failure) for failure in judge([delta], LIMITS)] == [
        "prompt 0, position 1: another token where the reference was decided"
    ]
    delta = compare(_answer([1], [[1]], [[-1.0]]), _answer([2], [[2]], [[-1.0]]), 0.5)
    assert any("no token in common" in failure.reason for failure in judge([delta], LIMITS))


def test_each_limit_is_reported_once_per_prompt_at_its_first_position() -> None:
    ids = [[1, 2, 3]] * 3
    ref = _answer([1, 1, 1], ids, [[-1.0, -2.0, -3.0]] * 3)
    bad = _answer([1, 1, 1], ids, [[-1.0, -2.0, -3.0], [-1.0, -3.5, -2.0], [-1.0, -3.5, -2.0]])
    failures = judge([compare(ref, bad, 0.5)], LIMITS)
    assert [failure.position for failure in failures] == [1, 1, 1]
    assert "Pearson" in failures[0].reason
    assert "mean |delta|" in failures[1].reason
    assert "2 of 3 tokens differ by 0.5 or more" in failures[2].reason


# ------------------------------------------------------------------------------------------- bisect
@pytest.mark.parametrize(
    ("pairs", "dtype", "departure"),
    [
        # Rounding grows slowly.
        ([(1e-6, 1e-6), (3e-6, 2e-6), (9e-5, 8e-5), (2e-4, 3e-4)], "float32", None),
        ([(1e-6, 1e-6), (1e-6, 0.2), (0.3, 0.5)], "float32", ("layers.1", "decode")),
        ([(0.5, 0.1), (0.5, 0.5)], "bfloat16", ("layers.0", "prefill")),
    ],
)
def test_the_first_jump_is_named_with_its_phase(
    pairs: list[tuple[float, float]], dtype: str, departure: tuple[str, str] | None
) -> None:
    layers = [
        LayerDelta(name=f"layers.{n}", prefill=prefill, decode=decode)
        for n, (prefill, decode) in enumerate(pairs)
    ]
    found = first_departure(layers, dtype)
    assert (found and (found.layer, found.phase)) == departure
    assert departure is None or f"{departure[0]} departs in {departure[1]}" in str(found)


def _states(values: np.ndarray, *names: str) -> Layers:
    return Layers(names=names, states=values)


def test_errors_are_relative_by_phase_and_endless_where_not_finite() -> None:
    good = np.ones((1, 3, 4), dtype=np.float32) * 2
    bad, other = good.copy(), good.copy()
    bad[0, 0, 0] = np.nan
    other[0, 2] += 1
    (delta,) = layer_deltas(_states(good, "a"), _states(bad, "a"), num_decoded=1)
    assert (delta.prefill, delta.decode) == (float("inf"), 0.0)
    (delta,) = layer_deltas(_states(good, "x"), _states(other, "y"), num_decoded=1)
    assert (delta.name, delta.prefill, delta.decode) == ("y", 0.0, pytest.approx(0.5))
    two = _states(np.zeros((2, 3, 4), dtype=np.float32), "a", "b")
    with pytest.raises(ValueError, match="layers differ"):
        layer_deltas(_states(good, "a"), two, num_decoded=1)


# ------------------------------------------------------------------------------------- first layers
WEIGHTS = {
    "model-1.safetensors": [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.weight",
        "model.layers.1.mlp.experts.9.weight",
        "vision_tower.layers.7.weight",
    ],
    "model-2.safetensors": ["model.layers.2.mlp.weight", "model.layers.10.mlp.experts.0.weight"],
    "model-3.safetensors": ["transformer.h.1.weight", "transformer.h.2.weight", "lm_head.weight"],
}
LAYERS = {"num_hidden_layers": 11, "layer_types": ["a", "b", "c"], "hidden_size": 8}


def _job(folder: Path, count: int | None) -> Job:
    sizes = {"engine_args": {}, "prompts": ("a",), "max_tokens": 4, "num_logprobs": 8}
    return Job(side="cpu", model=str(folder), num_hidden_layers=count, **sizes)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name, tensors in WEIGHTS.items():
        save_file({tensor: torch.ones(2) for tensor in tensors}, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(LAYERS))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("words")
    return tmp_path


def test_the_first_layers_stay_and_all_that_is_no_layer(checkpoint: Path) -> None:
    with first_layers(_job(checkpoint, 2)) as job:
        folder = Path(job.model)
        kept = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
        assert kept == {*WEIGHTS["model-1.safetensors"], "transformer.h.1.weight", "lm_head.weight"}
        # The list of the weights would name files that are not there.
        weights = {"model-1.safetensors", "model-3.safetensors"}
        names = {path.name for path in folder.iterdir()}
        assert names == weights | {"config.json", "tokenizer.json"}
        config = json.loads((folder / "config.json").read_text())
        assert config == LAYERS | {"num_hidden_layers": 2, "layer_types": ["a", "b"]}
        assert (folder / "tokenizer.json").read_text() == "words"
    assert not folder.exists()
    assert json.loads((checkpoint / "config.json").read_text()) == LAYERS


def test_layers_of_the_text_part_are_counted(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"text_config": LAYERS}))
    with first_layers(_job(checkpoint, 1)) as job:
        config = json.loads((Path(job.model) / "config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == 1


def test_a_checkpoint_that_is_to_be_whole_is_left_where_it_is(checkpoint: Path) -> None:
    with first_layers(_job(checkpoint, None)) as job:
        assert job.model == str(checkpoint)


def test_other_files_of_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (
        pytest.raises(ValueError, match=r"holds no \*\.safetensors"),
        first_layers(_job(tmp_path, 1)),
    ):
        pass


# ------------------------------------------------------------------------------------ plain weights
def test_an_adapter_is_added(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "model", dtype="float32")
    adapter = make_adapter(checkpoint, tmp_path / "adapter", use_rslora=True)
    tensors = read_weights(checkpoint)
    add_adapter(tensors, adapter)
    wanted = load_file(merge(checkpoint, adapter, tmp_path / "merged") / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors[name], tensor, msg=name)


def test_what_cannot_be_added_is_said(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "model", dtype="float32")
    dora = make_adapter(checkpoint, tmp_path / "dora", use_dora=True)
    with pytest.raises(ValueError, match="use_dora is not known"):
        add_adapter(read_weights(checkpoint), dora)
    plain = make_adapter(checkpoint, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"adapts .*, which the checkpoint does not have"):
        add_adapter({}, plain)
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        read_weights(tmp_path)
    packed = make_quantized_checkpoint("llama", tmp_path / "packed", Recipe())
    with (
        pytest.raises(ValueError, match="is quantised: the transformers side adds no adapter"),
        plain_checkpoint(str(packed), str(plain)),
    ):
        pass


# ----------------------------------------------------------------------------------------- conftest
class Hub:
    """Snapshots that have been downloaded; nothing else can be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, commit: str = "1" * 40, **config: object) -> None:
        repository = self._folder / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Hub(tmp_path / "hub")
