"""Checks of adapter folders: each fault is rejected by name."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rbln_backend.lora.adapter_files import Shape, Target
from server.errors import InvalidAdapterError
from server.lora.folder import MAX_HEADER_BYTES, ServedModel, check_fit, read_folder, short_name
from tests.server.adapter_folders import PREFIX, TARGETS, write_adapter

BASE = ServedModel.of(["/models/tiny", "served"], TARGETS, max_rank=8)
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def check(folder: Path, root: Path | None = None) -> int:
    return check_fit(read_folder(str(folder), root), BASE)


def reason(folder: Path, root: Path | None = None) -> str:
    with pytest.raises(InvalidAdapterError) as caught:
        check(folder, root)
    assert caught.value.param == "lora_path"
    return caught.value.message


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def test_adapters_of_every_allowed_rank_fit(tmp_path: Path) -> None:
    for rank in (1, 5, 8):
        assert check(write_adapter(tmp_path / str(rank), rank=rank)) == rank
    every = write_adapter(tmp_path / "all", modules=("q_proj", "v_proj", "down_proj"))
    assert check(every) == 4
    half = write_adapter(
        tmp_path / "half", tensors={f"{Q0}.lora_A.weight": np.zeros((4, 16), np.float16)}
    )
    assert check(half) == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA' is read"),
        ({"r": 9}, "r is 9, and --max-lora-rank is 8"),
        ({"r": 0}, "r is 0, not a positive integer"),
        ({"r": True}, "r is True, not a positive integer"),
        ({"r": 3}, f"'{Q0}.lora_A.weight': the shape must be [3, 16], got [4, 16]"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', not a number"),
        ({"lora_alpha": ...}, "lora_alpha is None, not a number"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"layer_replication": ["x" * 9000]}, "layer_replication is ['xxx"),
        ({"base_model_name_or_path": "owner/Other-7B"}, "is 'owner/Other-7B', and the served"),
        ({"base_model_name_or_path": 7}, "base_model_name_or_path is 7"),
    ],
)
def test_faults_of_the_configuration(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    message = reason(write_adapter(tmp_path / "a", config=config))
    assert words in message
    assert "adapter_config.json" in message or "adapter_model.safetensors" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{Q0}.lora_A.weight": floats(4, 17)}, "got [4, 17]"),
        ({f"{Q0}.lora_B.weight": floats(16, 5)}, "got [16, 5]"),
        ({f"{Q0}.lora_A.weight": floats(4)}, "got [4]"),
        ({f"{Q0}.lora_A.weight": np.zeros((4, 16))}, "has the type F64"),
        ({f"{Q0}.lora_B.weight": None}, "'model.layers.0.self_attn.q_proj' has no lora_B"),
        (
            {f"{PREFIX}lm_head.lora_A.weight": floats(4, 16)},
            "module 'lm_head' cannot be adapted in the served model, whose layers for adapters are "
            "down_proj, q_proj, v_proj",
        ),
        (
            {f"{PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight": floats(4, 16)},
            "the served model has no module 'model.layers.2.self_attn.q_proj'",
        ),
        ({f"{Q0}.lora_magnitude_vector": floats(16)}, "is neither a lora_A.weight"),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": floats(4, 9)}, "is neither"),
        ({"x" * 4000: floats(1)}, "is neither"),
    ],
)
def test_faults_of_the_tensors(tmp_path: Path, tensors: dict[str, Any], words: str) -> None:
    message = reason(write_adapter(tmp_path / "a", tensors=tensors))
    assert words in message
    assert len(message) < 500


Q, V = "self_attn.q_proj", "self_attn.v_proj"
ALL = [f"model.layers.{layer}.{module}" for layer in (0, 1) for module in (Q, V)]


@pytest.mark.parametrize(
    ("config", "modules", "words"),
    [
        ({}, ALL, None),
        ({"target_modules": ["q_proj", "self_attn.v_proj", "k_proj"]}, ALL, None),
        ({"target_modules": ALL}, ALL, None),
        ({"target_modules": r"model\.layers\.\d\.self_attn\.[qv]_proj"}, ALL, None),
        ({"target_modules": "all-linear"}, ALL, None),
        ({"target_modules": None}, ALL, None),
        ({"layers_to_transform": [1]}, ALL[2:], None),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, ALL[:2], None),
        ({"exclude_modules": ["layers.1.self_attn.v_proj"]}, ALL[:3], None),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, ALL[:2], None),
        ({}, ALL[:2], f"it lacks matrices for '{ALL[2]}'"),
        ({}, ALL[:3], f"it lacks matrices for '{ALL[3]}'"),
        ({"target_modules": "all-linear"}, ALL[1:], f"it lacks matrices for '{ALL[0]}'"),
        ({"target_modules": r".*\.[qv]_proj"}, ALL[1:], f"it lacks matrices for '{ALL[0]}'"),
        (
            {"target_modules": ["q_proj", "v_proj", "down_proj"]},
            ALL,
            "'model.layers.0.mlp.down_proj'",
        ),
        ({"target_modules": ["q_proj"]}, ALL, f"it has matrices for '{ALL[1]}'"),
        ({"target_modules": r".*0\.self_attn\.[qv]_proj"}, ALL, f"it has matrices for '{ALL[2]}'"),
        ({"exclude_modules": r".*1.*v_proj"}, ALL, f"it has matrices for '{ALL[3]}'"),
        ({"layers_to_transform": [0]}, ALL, f"it has matrices for '{ALL[2]}'"),
        ({"layers_to_transform": [1], "layers_pattern": ["h"]}, ALL, "it has matrices"),
        ({"target_modules": 7}, ALL, "target_modules is 7"),
        ({"target_modules": ["q_proj", 7]}, ALL, "not a text or a list of texts"),
        ({"layers_to_transform": ["1"]}, ALL, "layers_to_transform is ['1']"),
        ({"target_modules": "("}, ALL, "target_modules is not a regular expression"),
        (
            {"target_modules": r"(?:(\w)|(.))*(?=\1{99}).*"},
            ALL,
            "target_modules takes more than 2 s",
        ),
    ],
)
def test_modules_of_the_file_and_of_its_configuration(
    tmp_path: Path, config: dict[str, Any], modules: list[str], words: str | None
) -> None:
    targets = {path: TARGETS[path] for path in modules}
    path = write_adapter(tmp_path / "a", targets=targets, config=config)
    if words is None:
        assert check(path) == 4
    else:
        assert words in reason(path)


def test_an_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "has no tensors" in reason(write_adapter(tmp_path / "a", modules=()))


def test_experts_in_stacks_and_an_lm_head(tmp_path: Path) -> None:
    experts = Target((Shape(16, 64), Shape(32, 16)), 3)
    stacks = {"model.layers.0.mlp.experts": experts, "lm_head": Target.linear(16, 40)}
    base = ServedModel.of(["tiny"], stacks, max_rank=8)

    def check_stack(folder: str, **shapes: tuple[int, ...]) -> int:
        names = {"a": "lora_A.weight", "b": "lora_B.weight"}
        stack = {f"{PREFIX}model.layers.0.mlp.experts.{names[k]}": s for k, s in shapes.items()}
        tensors = {name: floats(*shape) for name, shape in stack.items()}
        # PEFT writes the head that it found beside an adapter of it.
        tensors[f"{PREFIX}lm_head.base_layer.weight"] = floats(40, 16)
        path = write_adapter(tmp_path / folder, modules=(), tensors=tensors)
        return check_fit(read_folder(str(path), None), base)

    assert check_stack("first", a=(12, 16), b=(64, 12)) == 4
    assert check_stack("second", a=(12, 32), b=(16, 12)) == 4
    wanted = re.escape("the shape must be [12, 16] or [12, 32], got [4, 16]")
    with pytest.raises(InvalidAdapterError, match=wanted):
        check_stack("other", a=(4, 16), b=(64, 12))
    stacks["lm_head"] = Target.linear(16, 41)
    base = ServedModel.of(["tiny"], stacks, max_rank=8)
    with pytest.raises(InvalidAdapterError, match=r"'base_model.model.lm_head.base_layer.weight'"):
        check_stack("longer", a=(12, 16), b=(64, 12))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged"),
        (b"\xff" * 64, f"and the limit is {MAX_HEADER_BYTES}"),
        ((MAX_HEADER_BYTES).to_bytes(8, "little") + b"{", "is damaged"),
        ((2).to_bytes(8, "little") + b"[]", "is damaged"),
        ((20000).to_bytes(8, "little") + b"[" * 20000, "is damaged"),
    ],
)
def test_damaged_weights(tmp_path: Path, content: bytes, words: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(content)
    assert words in reason(folder)


def test_weights_that_were_cut_short(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "is damaged" in reason(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, not an array"),
        ("[" * 100_000, "is not valid JSON"),
        (" " * 1_100_000, "is larger than 1048576 bytes"),
    ],
)
def test_damaged_configuration(tmp_path: Path, content: str, words: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_config.json").write_text(content)
    assert words in reason(folder)


def test_only_safetensors_is_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "it has adapter_model.bin, and only adapter_model.safetensors" in reason(folder)
    (folder / "adapter_model.bin").unlink()
    assert "adapter_model.safetensors is missing" in reason(folder)
    os.mkfifo(folder / "adapter_model.safetensors")
    assert "not a regular file" in reason(folder)


def test_nothing_outside_the_root_is_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside = write_adapter(root / "inside")
    outside = write_adapter(tmp_path / "outside")
    assert check(Path("inside"), root) == check(inside, root) == 4
    (root / "link").symlink_to(inside)
    assert check(Path("link"), root) == 4

    (root / "escape").symlink_to(outside)
    (root / "circle").symlink_to(root / "circle")
    for path in ("escape", str(outside), "../outside", "inside/../../outside", "/etc"):
        assert "does not lie below --lora-root" in reason(Path(path), root)
    # Missing files get the same answer, so that errors reveal nothing outside the root.
    assert "does not lie below --lora-root" in reason(Path("../nothing"), root)
    for path in ("circle", "nothing", "x" * 300):
        assert "is not a directory" in reason(Path(path), root)
    for path in ("", "a\0b", "a/" * 3000):
        with pytest.raises(InvalidAdapterError, match="1 to 4096 characters"):
            read_folder(path, root)

    (inside / "adapter_config.json").unlink()
    (inside / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    assert "is a link to a file that does not lie below" in reason(inside, root)


def test_the_root_may_itself_be_a_link(tmp_path: Path) -> None:
    write_adapter(tmp_path / "real" / "a")
    (tmp_path / "root").symlink_to(tmp_path / "real")
    assert check(Path("a"), tmp_path / "root") == 4


def test_base_models_are_compared_by_their_last_name(tmp_path: Path) -> None:
    assert short_name("owner/Tiny-1B") == short_name("/data/tiny-1b/") == "tiny-1b"
    assert short_name("/c/hub/models--owner--Tiny-1B/snapshots/0a1b") == "tiny-1b"
    for name in ("other/TINY", "served", "", None):
        folder = write_adapter(tmp_path / "a", config={"base_model_name_or_path": name})
        assert check(folder) == 4
    folder = write_adapter(tmp_path / "b", config={"base_model_name_or_path": "else"})
    assert "--lora-base-names" in reason(folder)
    read = read_folder(str(folder), None)
    assert check_fit(read, BASE, any_base=True) == 4
    assert check_fit(read, ServedModel.of(["*"], TARGETS, 8)) == 4


def test_a_configuration_of_peft_is_taken_as_it_is(tmp_path: Path) -> None:
    # Every field that PEFT 0.18 writes, with the values of a plain adapter.
    plain = json.loads(
        '{"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null,'
        ' "auto_mapping": null, "corda_config": null, "ensure_weight_tying": false,'
        ' "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,'
        ' "inference_mode": true, "init_lora_weights": true, "layer_replication": null,'
        ' "layers_pattern": null, "layers_to_transform": null, "loftq_config": {},'
        ' "lora_bias": false, "lora_dropout": 0.05, "megatron_config": null,'
        ' "megatron_core": "megatron.core", "peft_version": "0.18.0", "qalora_group_size": 16,'
        ' "rank_pattern": {}, "revision": null, "target_parameters": null,'
        ' "trainable_token_indices": null, "use_qalora": false, "use_rslora": true}'
    )
    assert check(write_adapter(tmp_path / "a", config=plain)) == 4
