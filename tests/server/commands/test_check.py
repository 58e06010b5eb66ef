"""`rbln-serve check`: the real command on folders without weights, and `serve` refusing alike."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint_tokenizer import VOCAB_SIZE
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import random_medusa
from tests.kernel_cache import share_kernels
from tests.multimodal_checkpoints import make_multimodal_checkpoint
from tests.quantized_checkpoints import Recipe, quantization_config
from tests.server.commands.conftest import OFFLINE
from tests.server.commands.test_commands import rbln_serve
from tests.server.model_folders import CANNOT_RUN, LLAMA, window_model, write_folder
from tests.server.real_server import FLAGS, RealServer
from tests.warm_process import WarmProcess

pytestmark = pytest.mark.engine

Check = Callable[..., subprocess.CompletedProcess[str]]
Verdict = Callable[..., dict[str, Any]]


@pytest.fixture
def check(warm_cli: WarmProcess) -> Check:
    def check(*args: str | Path, **limits: int) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **OFFLINE}
        return warm_cli.run("check", *map(str, args), environ=environ, **limits)

    return check


@pytest.fixture
def verdict(check: Check) -> Verdict:
    def verdict(*args: str | Path, **limits: int) -> dict[str, Any]:
        done = check(*args, "--json", **limits)
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["ok"] is (done.returncode == 0), done.stderr
        return found

    return verdict


@pytest.fixture
def folder(tmp_path: Path, checkpoints: CheckpointCache) -> Any:
    def make(config: Any) -> Path:
        return write_folder(tmp_path / "model", config, checkpoints("llama"))

    return make


def test_a_model_that_can_run_is_described(check: Check, folder: Any) -> None:
    flags = (*FLAGS, "--enable-lora", "--max-loras", "3", "--kv-cache-dtype", "fp8")
    drafts = '{"method": "suffix", "num_speculative_tokens": 2}'
    flags = (*flags, "--speculative-config", drafts)
    done = check(folder(LLAMA), *flags)
    assert done.returncode == 0, done.stderr
    report = {line[2:18].rstrip(): line[19:] for line in done.stdout.splitlines()[1:]}
    assert report["architecture"] == "LlamaForCausalLM (generates text)"
    assert report["layers"] == "4"
    assert report["KV cache"] == "4 layers, full attention, 2 KV heads of 32 in float8_e4m3fn"
    assert report["context"] == "256 tokens in blocks of 16"
    assert report["prefill chunks"] == "16, 32, 64"
    assert report["decode buckets"] == "1, 2, 4"
    assert report["drafts"] == "checked by steps of 1x2, 1x3, 2x2, 2x3, 4x2, 4x3"
    assert report["prefix caching"].startswith("on: ")
    assert report["adapters"] == "3 slots for ranks up to 16"
    assert report["device"] == "emulated"
    assert report["tools"].endswith("(rendered by vLLM, without a Jinja template), calls not read")
    assert report["memory"].startswith("about ")
    assert report["  adapters"].endswith(" MiB")
    assert " blocks of 16 tokens" in report["  KV blocks"]
    assert report["compile cache"].split()[1:5] == ["0", "of", "13", "graphs"]


LACKING = [
    (
        "llama",
        [
            "model.layers.1.self_attn.k_proj.weight",
            "model.layers.1.mlp.up_proj.weight",
            "model.embed_tokens.weight",
            "model.norm.weight",
        ],
    ),
    ("qwen2", ["model.layers.0.self_attn.v_proj.bias"]),
    ("qwen3_moe", ["model.layers.1.mlp.gate.weight"]),
    ("mixtral", ["model.layers.1.block_sparse_moe.gate.weight"]),
]

_WHOLE: set[str] = set()
"""Families whose whole checkpoint has been accepted."""


def without(source: Path, target: Path, names: Sequence[str]) -> Path:
    """Copy a checkpoint of one file, without some of its tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in names:
        del tensors[name]
    (target / "model.safetensors").unlink()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(("arch", "names"), LACKING)
def test_a_checkpoint_that_lacks_weights_cannot_run(
    verdict: Verdict, checkpoints: CheckpointCache, tmp_path: Path, arch: str, names: list[str]
) -> None:
    path = checkpoints(arch)
    if arch not in _WHOLE:
        assert verdict(path, *FLAGS)["ok"]
        _WHOLE.add(arch)
    found = verdict(without(path, tmp_path / "model", names), *FLAGS)
    for name in names:
        assert name.removeprefix("model.") in found["reason"]


def test_an_expert_that_a_checkpoint_lacks_is_noticed(
    verdict: Verdict, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    source = checkpoints("qwen3_moe")
    names = [n for n in load_file(source / "model.safetensors") if "experts.1.down" in n][:1]
    found = verdict(without(source, tmp_path / "model", names), *FLAGS)
    assert "layers." in found["reason"]
    assert "experts" in found["reason"]


def test_a_start_without_weights_fails_by_name(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    path = without(checkpoints("llama"), tmp_path / "model", [name])
    with RealServer(path, tmp_path) as server:
        assert name in server.reason_of_death()


def test_mistrals_file_beside_others_is_not_read(
    verdict: Verdict, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """vLLM would read it alone."""
    path = without(checkpoints("llama"), tmp_path / "model", [])
    save_file({"norm.weight": torch.ones(1)}, path / "consolidated.safetensors")
    assert verdict(path, *FLAGS)["ok"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--tool-call-parser", "llama3_json", "--enable-auto-tool-choice"), "<|python_tag|>"),
        (("--reasoning-parser", "olmo3"), "it has no token 'Ġ</'"),
        (("--reasoning-parser", "deepseek_r1"), "could not locate think start/end tokens"),
        (("--reasoning-parser", "poolside_v1"), "Tokenizer must contain '<assistant>' token"),
    ],
)
def test_a_parser_that_does_not_fit_the_tokenizer_cannot_run(
    verdict: Verdict, checkpoints: CheckpointCache, flags: tuple[str, ...], reason: str
) -> None:
    found = verdict(checkpoints("llama"), *FLAGS, *flags)
    assert f"{' '.join(flags[:2])} does not fit the tokenizer" in found["reason"]
    assert reason in found["reason"]
    assert "Error:" not in found["reason"]


def test_a_start_with_a_parser_that_does_not_fit_fails(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "llama3_json")
    with RealServer(checkpoints("llama"), tmp_path, *flags) as server:
        assert "llama3_json does not fit the tokenizer" in server.reason_of_death()


def test_a_draft_model_is_named_and_counted(
    check: Check, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    served = checkpoints("llama")
    heads = random_medusa(tmp_path / "heads", served, heads=2)
    drafts = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 2}
    with_heads, without = (
        check(served, *FLAGS, *more).stdout.splitlines()
        for more in (("--speculative-config", json.dumps(drafts)), ())
    )
    report = {line[2:18].rstrip(): line[19:] for line in with_heads}
    assert report["draft model"] == f"medusa, {heads}"
    weights, plain = (_parameters(lines) for lines in (with_heads, without))
    assert weights - plain == pytest.approx(2 * (128 * 128 + VOCAB_SIZE * 128) / 1e6, abs=0.11)
    # Six steps, three chunks, three sizes of heads, the LM head and those that check drafts.
    assert report["compile cache"].split()[1:5] == ["0", "of", "16", "graphs"]


def _parameters(report: Sequence[str]) -> float:
    """Return the million parameters that a report counts."""
    (line,) = [line for line in report if "M parameters" in line]
    return float(line[19:].split("M parameters")[0].replace(",", ""))


def test_what_is_told_is_what_is_served(
    verdict: Verdict, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("llama", dtype="float32")
    room = ("--kv-cache-memory-bytes", str(64 << 20))
    report = verdict(checkpoint, *FLAGS, *room)
    with RealServer(checkpoint, tmp_path, *room) as server:
        ready: Any = server.until_ready()
        weight_bytes = server.metric('rbln_device_memory_bytes{kind="weights"')
        kv_bytes = server.metric('rbln_device_memory_bytes{kind="kv"')
        blocks = server.metric("rbln_kv_blocks{")
        resident = psutil.Process(server.engine_pid()).memory_info().rss
    assert report["num_graphs"] == ready["graphs"]["total"]
    assert report["weight_bytes"] == weight_bytes
    assert report["dtype"] == "float32"
    # One block belongs to no request: padded rows write there.
    assert report["memory"]["num_blocks"] == blocks + 1
    assert report["memory"]["kv_bytes"] == kv_bytes
    # An estimate, of which the libraries of the process are most.
    assert report["memory"]["needed_bytes"] == pytest.approx(resident, rel=0.5)


def test_windows_and_full_attention_are_groups(verdict: Verdict, folder: Any) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = window_model("Gemma3ForCausalLM", "gemma3_text", layer_types=kinds)
    # The check does not wait for the other rank; numbers are those of the whole model.
    report = verdict(folder(config), *FLAGS, "--tensor-parallel-size", "2")
    groups = [(g["num_layers"], g["kind"], g["window"]) for g in report["kv_groups"]]
    assert groups == [(2, "sliding window of 64", 64), (2, "full attention", None)]
    assert report["num_layers"] == 4
    assert report["prefix_caching"] is True


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
        (
            ["--additional-config", '{"rbln": {"window_prefix_cache": false}}'],
            "window_prefix_cache",
        ),
    ],
)
def test_why_prefix_caching_is_off(
    verdict: Verdict, folder: Any, flags: list[str], reason: str
) -> None:
    config = window_model("MistralForCausalLM", "mistral")
    report = verdict(folder(config), *FLAGS, *flags)
    assert report["prefix_caching"] is False
    assert reason in report["prefix_caching_reason"]
    assert [group["window"] for group in report["kv_groups"]] == [64]


def test_a_model_larger_than_the_memory_is_described_in_little_of_it(
    verdict: Verdict, folder: Any
) -> None:
    sizes = {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    report = verdict(folder({**LLAMA, **sizes}), address_space=16 << 30)
    assert report["ok"] is False
    assert report["weight_bytes"] > 700 * 2**30
    assert "without any KV cache it needs about" in report["reason"]
    assert "--tensor-parallel-size" in report["reason"]


@pytest.mark.parametrize(
    ("recipe", "report"),
    [
        (Recipe(format="fp8", block=(64, 128)), "W8A16 FP8 group 128 (published as FP8 W8A8)"),
        (Recipe(format="awq"), "W4A16 group 64 with zero points"),
    ],
    ids=["fp8", "awq"],
)
def test_how_weights_are_quantised_is_told(
    check: Check, folder: Any, recipe: Recipe, report: str
) -> None:
    path = folder({**LLAMA, "quantization_config": quantization_config(recipe)})
    done = check(path, *FLAGS)
    assert done.returncode == 0, done.stderr
    assert f": 16 layers {report}" in done.stdout


@pytest.mark.parametrize("feature", CANNOT_RUN)
def test_what_cannot_run_is_refused_with_the_reason(
    verdict: Verdict, folder: Any, feature: str
) -> None:
    config, words = CANNOT_RUN[feature]
    answer = verdict(folder(config))
    assert answer["ok"] is False
    for word in words:
        assert word in answer["reason"]
    assert "\n" not in answer["reason"]


def test_a_refusal_is_one_line(check: Check, folder: Any) -> None:
    done = check(folder(CANNOT_RUN["dual chunk attention"][0]))
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("This model cannot run: dual chunk attention: ")


def test_how_tools_reach_the_model(check: Check, verdict: Verdict, folder: Any) -> None:
    path = folder(LLAMA)
    template = path / "chat_template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert verdict(path)["tools"] == {
        "prompt": "default",
        "parser": "hermes",
        "reason": "the chat template shows no tools",
    }
    done = check(path, "--no-default-tool-prompt")
    assert "  tools            refused (the model's chat template shows no tools" in done.stdout
    template.write_text("{{ tools }}")
    assert verdict(path)["tools"]["prompt"] == "template"


def test_flags_that_exclude_the_model_are_a_reason_too(verdict: Verdict, folder: Any) -> None:
    report = verdict(folder(LLAMA), "--tensor-parallel-size", "2", "--nnodes", "2")
    assert report["ok"] is False
    assert "ranks on other hosts that neither Ray nor --headless starts" in report["reason"]
    assert "--distributed-executor-backend ray" in report["reason"]


def test_a_folder_without_a_tokenizer(verdict: Verdict, folder: Any) -> None:
    path = folder(LLAMA)
    for file in path.glob("*token*"):
        file.unlink()
    assert "the tokenizer cannot be loaded" in verdict(path)["reason"]
    assert verdict(path, "--skip-tokenizer-init")["ok"] is True


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["/nowhere"], "MODEL: there is no directory '/nowhere'"),
        (["./nowhere"], "MODEL: there is no directory './nowhere'"),
        (["~/nowhere"], "MODEL: there is no directory '~/nowhere'"),
        (["nowhere/at/all"], "MODEL: there is no directory 'nowhere/at/all'"),
        (["tests/nowhere"], "MODEL: there is no directory 'tests/nowhere'"),
        (["nowhere.gguf"], "MODEL: there is no file 'nowhere.gguf'"),
        (["some-org/nowhere.GGUF"], "MODEL: there is no file 'some-org/nowhere.GGUF'"),
        (["pyproject.toml"], "MODEL: 'pyproject.toml' is a file; name a folder"),
        ([".", "--tokenizer", "./nowhere"], "--tokenizer: there is no directory './nowhere'"),
        ([".", "--hf-config-path", "/nowhere"], "--hf-config-path: there is no directory"),
        ([".", "--no-such-flag"], "--no-such-flag"),
        ([], "MODEL is missing"),
    ],
)
def test_usage_errors_end_with_2(check: Check, args: list[str], words: str) -> None:
    done = check(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.wide
def test_a_missing_file_is_not_fetched_from_a_hub(tmp_path: Path) -> None:
    """A process of its own: the hub's client reads where the hub is when it is imported."""
    requested: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requested.append(self.path)
            self.send_error(404)

        def do_GET(self) -> None:
            self.do_HEAD()

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{hub.server_port}"
        environ = {**OFFLINE, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": place}
        done = rbln_serve("check", "nowhere/model.gguf", **environ)
        hub.shutdown()
    assert (done.returncode, requested) == (2, [])
    assert "MODEL: there is no file 'nowhere/model.gguf'" in done.stderr


def test_a_name_that_the_hub_does_not_give(verdict: Verdict, folder: Any) -> None:
    reason = verdict("some-org/some-model")["reason"]
    assert "'some-org/some-model' is no directory" in reason


@pytest.mark.wide
def test_without_our_platform(folder: Any) -> None:
    """The platform is found while vLLM is imported: this is a process of its own."""
    done = rbln_serve("check", str(folder(LLAMA)), **OFFLINE, VLLM_PLUGINS="")
    assert done.returncode == 2
    assert "not on the RBLN platform" in done.stderr


@pytest.mark.wide
@pytest.mark.parametrize("feature", ["state space", "prefix LM"])
def test_serve_refuses_for_the_same_reason(
    verdict: Verdict, folder: Any, tmp_path: Path, feature: str
) -> None:
    """One is found in the configuration, the other by the engine process in a layer's cache.

    Neither folder has weights, so reading them would be another reason.
    """
    path = folder(CANNOT_RUN[feature][0])
    reason = verdict(path)["reason"]
    with RealServer(path, tmp_path, "--skip-tokenizer-init") as server:
        assert server.reason_of_death() == reason
        assert server.client.get("/livez").status_code == 503
        assert server.process.wait(30) == 1
        assert f"start-up failed: {reason}" in server.log.read_text()


def test_a_model_of_the_catalogue_must_be_fetched(
    verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(share_kernels(tmp_path / "cache")))
    assert verdict("smollm2")["reason"].endswith("run `rbln-serve fetch smollm2`")


def test_a_gguf_file_is_refused_by_each_command_with_the_one_that_converts_it(
    warm_cli: WarmProcess, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    for command in ("check", "compile", "serve"):
        done = warm_cli.run(command, str(file), environ={**os.environ, **OFFLINE})
        assert done.returncode == 2
        assert f"`rbln-serve fetch {file} OUT`" in done.stderr


def test_the_text_model_of_a_multimodal_checkpoint_needs_its_flag(
    verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_multimodal_checkpoint("gemma3", tmp_path)
    refused = verdict(checkpoint, *FLAGS)["reason"]
    assert "multimodal inputs" in refused
    assert "--language-model-only" in refused
    flagged = verdict(checkpoint, *FLAGS, "--language-model-only")
    assert (flagged["ok"], flagged["num_layers"]) == (True, 4)
    monkeypatch.setenv("VLLM_RBLN_DISABLE_MM", "1")
    assert verdict(checkpoint, *FLAGS)["kv_groups"] == flagged["kv_groups"]
