"""Checkpoints that can have a processor, whose chat template vLLM prefers."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.vllm.patches import has_no_processor


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": "{}", "tokenizer_config.json": "{}"}, True),
        ({}, True),
        ({"config.json": "{}", "processor_config.json": "{}"}, False),
        ({"preprocessor_config.json": "{}"}, False),
        ({"tokenizer_config.json": '{"processor_class": "LlavaProcessor"}'}, False),
        ({"config.json": '{"auto_map": {"AutoProcessor": "own.Own"}}'}, False),
    ],
)
def test_files_and_fields_tell(tmp_path: Path, files: dict[str, str], expected: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert has_no_processor(tmp_path) is expected


def test_models_of_the_hub_may_have_one(tmp_path: Path) -> None:
    assert not has_no_processor(tmp_path / "owner" / "model")
