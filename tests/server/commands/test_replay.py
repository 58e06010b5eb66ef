"""`rbln-serve replay`: answers of each kind have the same tokens, and other weights are found."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from server.audit.log_files import log_files
from server.commands.replay import replay_settings
from server.settings import ServerSettings
from tests.adapters import make_adapter
from tests.checkpoints import CheckpointCache
from tests.graph_cache import graph_cache
from tests.server.real_server import RealServer
from tests.warm_process import warm_process

pytestmark = pytest.mark.engine

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}'
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 9, "temperature": 0}, 1),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 9, "temperature": 1, "n": 3}, 3),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 9, "stream": True, "seed": 7}, 1),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 40, "response_format": FORM}, 1),
    ("/v1/completions", {"prompt": ["a b a b", "c"], "max_tokens": 20, "stop": ["e"]}, 2),
    ("/v1/completions", {"prompt": "a", "max_tokens": 9, "model": "blue", "temperature": 2}, 1),
    ("/v1/completions", {"prompt": "b", "max_tokens": 9, "model": "blue", "temperature": 0}, 1),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 9}, 1),
    ("/v1/messages", {"messages": HI, "max_tokens": 9}, 1),
]
NUM_ANSWERS = sum(count for _, _, count in BODIES)


class Logged(NamedTuple):
    """A log that a server has left, and its checkpoint."""

    root: Path
    checkpoint: Path


def replayed(tmp_path: Path, *command: str) -> tuple[int, dict[str, Any]]:
    """Run the command with `--json`; return its exit code and its object."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_"))}
    environ = {**kept, "VLLM_CACHE_ROOT": str(graph_cache()), "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "out").open("wb") as output, (tmp_path / "log").open("wb") as log:
        words = ["replay", *command, "--json", "--run-root", str(tmp_path)]
        process = warm_process().start(*words, environ=environ, output=output, errors=log)
    status = process.wait(240)
    text = (tmp_path / "out").read_text()
    assert text, (tmp_path / "log").read_text()
    return status, json.loads(text.splitlines()[-1])


@pytest.fixture(scope="module")
def logged(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Logged]:
    """The log of a server that has answered every body."""
    folder = tmp_path_factory.mktemp("audited")
    checkpoint = checkpoints("llama", dtype="float32")
    adapter = make_adapter(checkpoint, folder / "blue")
    flags = ["--audit-log", str(folder / "audit"), "--enable-lora", "--max-loras", "2"]
    flags += ["--lora-modules", f"blue={adapter}", "--speculative-config", DRAFTS]
    with RealServer(checkpoint, folder, *flags) as server:
        server.until_ready()
        for route, body, _ in BODIES:
            answer = server.client.post(
                route,
                json={"model": "tiny", **body},
                headers={"x-llm-d-slo-ttft-ms": "600000"},
            )
            assert answer.status_code == 200, answer.text
        info = server.client.get("/v1/server_info").json()["audit"]
        assert info["dropped"] == 0
        end = time.monotonic() + 10
        while server.metric("rbln_audit_records_total") < NUM_ANSWERS:
            assert time.monotonic() < end
            time.sleep(0.02)
        server.terminate()
        assert server.process.wait(60) == 0
    yield Logged(folder / "audit", checkpoint)


def test_answers_of_each_kind_have_the_same_tokens(logged: Logged, tmp_path: Path) -> None:
    """The recorded command line starts the engine; all run together, in another batch than then."""
    status, report = replayed(tmp_path, str(logged.root))
    assert (report["same"], report["different"], report["not_replayed"]) == (NUM_ANSWERS, [], [])
    assert (status, report["broken"], report["engine"]) == (0, [], [])


def test_unseeded_answers_have_seeds_of_their_own(logged: Logged) -> None:
    """Each of `n` answers draws from another one, and no record has a key or a text of the body."""
    (file,) = log_files(logged.root)
    records = [json.loads(line) for line in file.read_bytes().splitlines()]
    answers = [record for record in records if record["kind"] == "answer"]
    assert len(answers) == NUM_ANSWERS
    seeds = [record["params"].get("seed") for record in answers[1:4]]
    assert sorted(seeds) == [min(seeds) + index for index in range(3)]
    assert {record["adapter"]["name"] for record in answers if record["adapter"]} == {"blue"}
    assert all("text" not in record["body"] for record in answers)
    # A replay with the request's objective could be refused.
    assert b"slo_objective" not in file.read_bytes()


def test_a_flipped_bit_of_a_weight_is_found(logged: Logged, tmp_path: Path) -> None:
    """The digest differs, and so do tokens, if the bit is one that matters."""
    changed = tmp_path / "changed"
    shutil.copytree(logged.checkpoint, changed)
    weights = changed / "model.safetensors"
    content = bytearray(weights.read_bytes())
    head_bytes = int.from_bytes(content[:8], "little")
    start, _ = json.loads(content[8 : 8 + head_bytes])["lm_head.weight"]["data_offsets"]
    # The largest bit of the exponent of the third float32: logits of token 0 become very large.
    content[8 + head_bytes + start + 11] ^= 0x40
    weights.write_bytes(content)
    (file,) = log_files(logged.root)
    header = json.loads(file.read_bytes().splitlines()[0])
    # Neither drafts nor the names of adapters are needed: these are read from their paths.
    dropped = header["argv"].index("--lora-modules")
    flags = [str(changed), *header["argv"][1:dropped], "--max-num-seqs", "2"]
    status, report = replayed(tmp_path, str(logged.root), *flags)
    assert (status, report["not_replayed"]) == (1, [])
    assert [entry["field"] for entry in report["engine"]] == ["weights", "graphs"]
    assert report["different"]
    first = report["different"][0]
    assert first["recorded"]["logprob"] <= 0
    assert first["replayed"]["logprob"] is not None


def test_base_names_are_set_only_with_adapters(tmp_path: Path) -> None:
    """`--lora-base-names` is refused without `--enable-lora`."""
    settings = ServerSettings(audit_log=tmp_path)
    assert replay_settings(["model"], settings).lora_base_names == settings.lora_base_names
    assert replay_settings(["model", "--enable_lora"], settings).lora_base_names == ("*",)
    assert replay_settings(["model"], settings).audit_log is None


def test_a_removed_line_is_found_without_an_engine(logged: Logged, tmp_path: Path) -> None:
    """The place is that of the record after it."""
    (file,) = log_files(logged.root)
    lines = file.read_bytes().splitlines(keepends=True)
    copy = tmp_path / file.name
    copy.write_bytes(b"".join(lines[:4] + lines[5:]))
    status, report = replayed(tmp_path, str(copy), "--verify-only")
    assert status == 1
    assert [(found["file"], found["line"]) for found in report["broken"]] == [(str(copy), 5)]
