"""Lines before the runs and about a position, in the documented terms."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from rbln_backend.parity.jobs import Answer, SideResult
from rbln_backend.parity.options import parse
from rbln_backend.parity.report import json_lines, text_report
from rbln_backend.parity.run import Comparison, Outcome, compare, heading, launch

OPTIONS = parse(["--no-color", "--topk", "2"])
CPU = Answer(
    prompt_ids=np.array([1, 2]),
    token_ids=np.array([7]),
    text="a",
    top_ids=np.array([[7, 8, 9]]),
    logprobs=np.array([[-0.5, -1.0, -1.25]], dtype=np.float32),
)
# The second and the third have changed places.
RBLN = replace(
    CPU,
    top_ids=np.array([[7, 9, 8]]),
    logprobs=np.array([[-0.5, -1.0, -1.125]], dtype=np.float32),
)


def _outcome() -> Outcome:
    about = {"vocab_size": 4321}
    results = {
        side: SideResult(answers=(answer,), seconds=1.0, about=about)
        for side, answer in (("cpu", CPU), ("rbln", RBLN))
    }
    pair = Comparison(base="cpu", other="rbln", deltas=(compare(CPU, RBLN, 0.5),))
    return Outcome(
        options=OPTIONS, results=results, pairs=(pair,), failures=(), clamped=("--topk is 2",)
    )


def test_the_heading_is_the_documented_one() -> None:
    options = parse(["--ep", "--tp", "4", "--num-prompts", "3"])
    assert heading(options, "some-org/some-model") == (
        "Model = some-org/some-model, EP=True, TP=4, PP=1, DP=1, MaxTokens=256, Logprobs=1024, "
        "Prompts=3"
    )


def test_a_side_s_environment_is_printed() -> None:
    cpu = "\n".join(launch("cpu", {"VLLM_PLUGINS": "cpu"}))
    assert cpu == "\n[main] Launching CPU worker…\n[cpu] VLLM_PLUGINS = cpu"
    rbln = list(launch("rbln", {"VLLM_DISABLE_COMPILE_CACHE": "1"}))
    assert "[rbln] VLLM_PLUGINS = <unset>" in rbln
    assert "[rbln] VLLM_DISABLE_COMPILE_CACHE = 1" in rbln


def test_each_side_is_ranked_by_itself() -> None:
    lines = text_report(_outcome()).splitlines()
    assert any(line.split() == ["vocabulary", "size", "4321"] for line in lines)
    ranks = [line.split() for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert ranks == [
        ["1", "7", "-0.500000", "7", "-0.500000"],
        ["2", "9", "-1.000000", "8", "-1.000000"],
    ]


def test_programs_get_a_json_object_a_line() -> None:
    lines = [json.loads(line) for line in json_lines(_outcome()).splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["run", "side", "answer", "side", "answer", "prompt", "pair", "verdict"]
    run, cpu, cpu_answer, _, rbln_answer, prompt, pair, verdict = lines
    assert run["clamped"] == ["--topk is 2"]
    assert cpu["about"]["vocab_size"] == 4321
    assert cpu_answer["ranking"] == [[7, -0.5], [8, -1.0]]
    assert rbln_answer["ranking"] == [[7, -0.5], [9, -1.0]]
    assert prompt["positions"][0]["max_delta"] == pair["max_delta"] == 0.25
    assert verdict == {"kind": "verdict", "passed": True, "failures": [], "departure": None}
