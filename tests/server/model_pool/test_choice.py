"""Names of adapters, and the model of an upload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.errors import InvalidValueError
from server.lora.state_file import Remembered, StateFile
from server.model_pool.choice.adapter_names import AdapterNames
from server.model_pool.choice.batch_files import (
    first_line_of,
    input_file_of,
    model_of_line,
    model_of_message_batch,
)

FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n"
)
LINE = json.dumps({"custom_id": "a", "body": {"model": "m", "prompt": "x"}}).encode()


def test_adapters_of_flags_and_of_the_state_file_are_known(tmp_path: Path) -> None:
    state = tmp_path / "adapters.json"
    flags = ["--max-loras", "2", "--lora-modules", "a=/x", '{"name": "b", "path": "/y=z"}']
    names = AdapterNames([*flags, "--lora-root", "c=/z"], state)
    assert all(name in names for name in "ab")
    assert "c" not in names
    StateFile(state).write([Remembered("d", "/d")])
    assert "d" in names
    assert "d" not in AdapterNames(flags, None)


@pytest.mark.parametrize("cut", [10, 60, len(FORM) - 1, len(FORM), len(FORM) + 20])
def test_more_of_an_upload_is_received_until_its_first_line_is_complete(cut: int) -> None:
    whole = FORM + LINE + b"\n" + LINE + b"\r\n--x--\r\n"
    assert first_line_of(whole[:cut], complete=False) is None
    line = first_line_of(whole, complete=False)
    assert line is not None
    assert model_of_line(line) == "m"


def test_bodies_that_name_no_model_are_seen() -> None:
    assert model_of_line(b"{") is None
    assert model_of_line(b'{"body": {}}') is None
    assert model_of_message_batch(b'{"requests": []}') is None
    named = b'{"requests": [{"custom_id": "a", "params": {"model": "m"}}]}'
    assert model_of_message_batch(named) == "m"
    assert input_file_of(b'{"input_file_id": "f"}') == "f"
    with pytest.raises(InvalidValueError):
        input_file_of(b"{}")
