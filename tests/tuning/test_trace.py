"""Traces in the forms that are published become requests by time."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.tuning.simulator import Request
from server.tuning.trace import read_trace

WANTED = [Request(0.0, 10, 5), Request(1.5, 20, 7)]
FORMS = {
    "ours.jsonl": '{"arrival_s": 8.5, "prompt_tokens": 20, "output_tokens": 7}\n'
    '{"arrival_s": 7, "prompt_tokens": 10, "output_tokens": 5}\n',
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": []}\n'
    '{"timestamp": 1500, "input_length": 20, "output_length": 7, "hash_ids": []}\n',
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,10,5,15,API\n6,ChatGPT,10,0,10,API\n6.5,ChatGPT,20,7,27,API\n",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,10,5\n2023-11-16 18:17:05.4799600,20,7\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FORMS[name])
    found = read_trace(path)
    assert [(a.prompt_tokens, a.output_tokens) for a in found] == [(10, 5), (20, 7)]
    assert [a.at for a in found] == pytest.approx([a.at for a in WANTED])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"arrival_s": 1}\n', r"t.jsonl:1: none of the known sets of fields"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}\n', "prompt_tokens is 0"),
        ("\n{\n", "t.jsonl:2"),
        ("", "holds no request"),
    ],
)
def test_anything_else_is_refused_by_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_trace(path)
