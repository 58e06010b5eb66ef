"""Names of models on a hub, and the choice of files."""

from __future__ import annotations

import pytest

from rbln_backend.checkpoints.hub_download import HubFile, is_repo_name, needed_files
from rbln_backend.errors import CheckpointError


def chosen(*paths: str) -> list[str]:
    return [file.path for file in needed_files("o/r", [HubFile(path, 1) for path in paths])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo-1.5B_x", True),
        ("repo", False),
        ("a/b/c", False),
        ("./org/repo", False),
        ("/org/repo", False),
        ("org/repo.gguf", False),
        ("org/repo:Q4_K_M", False),
        # A folder of this repository.
        ("tests/unit", False),
    ],
)
def test_names(text: str, expected: bool) -> None:
    assert is_repo_name(text) is expected


def test_a_checkpoint_is_its_texts_and_one_form_of_its_weights() -> None:
    texts = ["config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "README.md"]
    pooling = ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = [
        *("consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"),
        *("original/params.json", ".gitattributes", "modeling_x.py", "x.gguf", "picture.png"),
    ]
    wanted = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    found = chosen(*texts, *pooling, *others, *wanted)
    assert sorted(found) == sorted([*texts, *pooling, *wanted])


def test_weights_of_other_forms() -> None:
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
