"""Names of models on a hub, and the choice of files."""

from __future__ import annotations

import pytest

from rbln_backend.checkpoints.hub_names import HubFile, HubName, hub_name, needed_files
from rbln_backend.errors import CheckpointError


def chosen(name: str, *paths: str) -> list[str]:
    found = hub_name(name)
    assert found is not None
    return [file.path for file in needed_files(found, [HubFile(path, 1) for path in paths])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo-1.5B_x:Q4_K_M", HubName("org/repo-1.5B_x", "Q4_K_M")),
        ("repo", None),
        ("a/b/c", None),
        ("./org/repo", None),
        ("/org/repo", None),
        ("org/repo.gguf", None),
        ("org/repo:", None),
        # A folder of this repository.
        ("tests/unit", None),
    ],
)
def test_names(text: str, expected: HubName | None) -> None:
    assert hub_name(text) == expected
    assert expected is None or str(expected) == text


def test_a_checkpoint_is_its_texts_and_one_form_of_its_weights() -> None:
    texts = ["config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "README.md"]
    pooling = ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = [
        *("consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"),
        *("original/params.json", ".gitattributes", "modeling_x.py", "x.gguf", "picture.png"),
    ]
    wanted = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    found = chosen("org/repo", *texts, *pooling, *others, *wanted)
    assert sorted(found) == sorted([*texts, *pooling, *wanted])


def test_weights_of_other_forms() -> None:
    assert chosen("o/r", "config.json", "consolidated.safetensors")[1:] == [
        "consolidated.safetensors"
    ]
    assert chosen("o/r", "config.json", "pytorch_model.bin", "optimizer.bin")[1:] == [
        "pytorch_model.bin"
    ]


GGUFS = (
    *("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf", "m-UD-Q8_0.gguf"),
    *("mmproj-m-Q6_K.gguf", "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"),
    "F16/m-F16-00001-of-00002.gguf",
)


@pytest.mark.parametrize(
    ("quant", "files"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k_s", ["m-Q4_K_S.gguf"]),
        ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("Q8_0", ["m-Q8_0.gguf"]),
        ("UD-Q8_0", ["m-UD-Q8_0.gguf"]),
        ("BF16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
    ],
)
def test_a_quantization_names_one_file_or_its_parts(quant: str, files: list[str]) -> None:
    assert chosen(f"org/repo:{quant}", *GGUFS) == files


@pytest.mark.parametrize(
    ("name", "paths", "message"),
    [
        ("o/r:Q4_K", GGUFS, "no GGUF file of Q4_K; it has .*m-Q4_K_M.gguf"),
        ("o/r:Q6_K", GGUFS, "no GGUF file of Q6_K"),
        ("o/r:F16", GGUFS, "lacks F16/m-F16-00002-of-00002.gguf"),
        ("o/r:Q8_0", ("a-Q8_0.gguf", "b-Q8_0.gguf"), "could be any of a-Q8_0.gguf, b-Q8_0.gguf"),
        ("o/r", GGUFS, "no weights that can be served; it has .*: name one as o/r:QUANT"),
        ("o/r", ("model.safetensors",), "no config.json"),
    ],
)
def test_what_cannot_be_served_is_explained(
    name: str, paths: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        chosen(name, *paths)
