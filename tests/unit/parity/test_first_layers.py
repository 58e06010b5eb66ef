"""A checkpoint of fewer layers: what stays of the weights and of the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rbln_backend.parity.jobs import Job
from rbln_backend.parity.layers import first_layers

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
    return Job(
        side="cpu",
        model=str(folder),
        engine_args={},
        prompts=("a",),
        max_tokens=4,
        num_logprobs=8,
        num_hidden_layers=count,
    )


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
        assert kept == {
            *WEIGHTS["model-1.safetensors"],
            "transformer.h.1.weight",
            "lm_head.weight",
        }
        # The list of the weights would name files that are not there.
        names = {path.name for path in folder.iterdir()}
        assert names == {
            "model-1.safetensors",
            "model-3.safetensors",
            "config.json",
            "tokenizer.json",
        }
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
