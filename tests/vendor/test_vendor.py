"""The vendor's wheels serve over the double, strictly, and answer as transformers does.

Needs the package registry once, for the wheels; see README.md here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sdk_double.launch import rule_table
from tests.vendor.call_form import call_form, kept_call_forms
from tests.vendor.runs import RUNS, Answered, run_vendor

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1200)]

ANSWERING = [name for name in RUNS if name != "compile only"]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answered]:
    """One run of each kind for all tests here."""
    kept: dict[str, Answered] = {}

    def once(name: str) -> Answered:
        if name not in kept:
            kept[name] = run_vendor(RUNS[name], tmp_path_factory.mktemp("vendor"))
        return kept[name]

    return once


@pytest.fixture(scope="module")
def warm_ranks(
    answered: Callable[[str], Answered], tmp_path_factory: pytest.TempPathFactory
) -> Answered:
    """A second start of two ranks, over what the first one left."""
    cache = answered("two ranks").log_path.parent / "cache"
    return run_vendor(RUNS["two ranks"], tmp_path_factory.mktemp("warm"), cache=cache)


@pytest.mark.parametrize("name", ANSWERING)
def test_answers_are_those_of_transformers(name: str, answered: Callable[[str], Answered]) -> None:
    run = answered(name)
    assert run.tokens == run.expected()
    assert run.calls("broken") == []


@pytest.mark.parametrize("name", RUNS)
def test_the_sdk_is_called_as_the_kept_form_says(
    name: str, answered: Callable[[str], Answered]
) -> None:
    assert call_form(answered(name).log_path) == kept_call_forms()[name]


@pytest.mark.parametrize("name", ["llama host", "latent"])
def test_a_dropped_copy_makes_their_answer_wrong(name: str, tmp_path: Path) -> None:
    run = run_vendor(RUNS[name], tmp_path, broken="kv_copy")
    (first, (hit,)), (first_expected, (hit_expected,)) = run.tokens, run.expected()
    assert first == first_expected
    assert len(run.calls("copy_kv")) == 1
    assert hit != hit_expected


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("fp8 experts", "scales"),
        ("fp8 experts w8a8", "scales"),
        ("mxfp4 experts", "nibbles"),
        ("e5m2 cache", "cache_dtype"),
        ("nvfp4 experts", "nibbles"),
        ("nvfp4 experts", "scales"),
    ],
)
def test_stored_values_read_otherwise_answer_otherwise(
    name: str, broken: str, tmp_path: Path
) -> None:
    """Theirs are read by the double's ops: another order of the parts, or dtype, shows."""
    run = run_vendor(RUNS[name], tmp_path, broken=broken)
    assert run.tokens != run.expected()


@pytest.mark.parametrize(("name", "same"), [("llama device", False), ("sampled", True)])
def test_sampled_tokens_come_from_no_argmax(name: str, same: bool, tmp_path: Path) -> None:
    """With ``argmax`` broken their greedy answer is wrong, and the drawn one is not."""
    run = run_vendor(RUNS[name], tmp_path, broken="argmax")
    assert (run.tokens == run.expected()) is same


def test_switched_on_inputs_of_linear_layers_are_scaled(
    answered: Callable[[str], Answered],
) -> None:
    """They are not rounded, so that the answer is the same: the graph shows it."""
    clamps = {
        name: sum(line["ops"].get("Tensor.clamp", 0) for line in answered(name).calls("compile"))
        for name in ("fp8 blocks", "fp8 blocks w8a8")
    }
    assert clamps["fp8 blocks"] == 0 < clamps["fp8 blocks w8a8"]


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3", "mtp latent", "mtp mimo"])
def test_fitted_drafts_are_accepted(name: str, answered: Callable[[str], Answered]) -> None:
    run = answered(name)
    assert run.accepted > 0.35 * run.drafted > 0


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3", "mtp latent", "mtp mimo"])
def test_drafts_without_hidden_states_are_rejected(name: str, tmp_path: Path) -> None:
    """Their answers stay those of transformers: only what the model itself says is kept."""
    run = run_vendor(RUNS[name], tmp_path, broken="hidden_states")
    assert run.tokens == run.expected()
    # Embeddings alone are right of some.
    assert run.accepted < 0.25 * run.drafted


def test_compile_only_leaves_binaries_that_a_host_with_an_npu_takes(tmp_path: Path) -> None:
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    cold.mkdir()
    warm.mkdir()
    compiled = run_vendor(RUNS["compile only"], cold, cache=tmp_path / "cache")
    assert all(line["dummy"] for line in compiled.calls("runtime"))
    served = run_vendor(RUNS["llama host"], warm, cache=tmp_path / "cache")
    assert _hits(served) == {True}
    assert served.tokens == served.expected()


def test_ranks_take_the_binaries_that_they_made(warm_ranks: Answered) -> None:
    assert _hits(warm_ranks) == {True}
    assert warm_ranks.calls("broken") == []
    assert warm_ranks.tokens == warm_ranks.expected()


def test_ranks_open_devices_of_their_own(answered: Callable[[str], Answered]) -> None:
    opened = [
        line["variables"]
        for line in answered("two ranks").calls("environment")
        if line["when"] == "open"
    ]
    assert {(told["LOCAL_RANK"], told["RBLN_VISIBLE_DEVICES"]) for told in opened} == {
        ("0", "0"),
        ("1", "1"),
    }


def test_every_rule_of_theirs_had_something_to_look_at(
    answered: Callable[[str], Answered], warm_ranks: Answered
) -> None:
    """A rule may be called the vendor's only where their runs meet it, and keep it."""
    weights = [
        given
        for line in answered("llama host").calls("compile")
        for given in line["inputs"]
        if given["kind"] == "weight"
    ]
    checks = {
        "aliases": any(len(line["inputs"]) > 1 for line in answered("llama host").calls("compile")),
        "contiguous": bool(weights),
        # Each graph with attention has linear layers before it.
        "axes": bool(_attention_calls(answered("llama host"))),
        "blocks": bool(_attention_calls(answered("llama host"))),
        "cache": len({line["pid"] for line in warm_ranks.calls("compile") if line["hit"]}) == 2,
        "devices": len({line["pid"] for line in answered("two ranks").calls("runtime")}) == 2,
        "kv": bool(answered("llama host").calls("copy_kv")),
        "marks": all(given["mark"] == "unguarded" for given in weights),
        "meta": bool(answered("llama host").calls("compile")),
        "names": bool(answered("two ranks").calls("compile")),
        "no_grad": bool(answered("llama host").calls("compile")),
        "options": all(line["options"] for line in answered("llama host").calls("compile")),
        "positions": _calls_op(answered("drafts"), "rbln::rejection_sample"),
        "routing": _calls_op(answered("experts"), "rbln_custom_ops::custom_moe_glu"),
        "runtime": all(line["dummy"] for line in answered("compile only").calls("runtime")),
        "schema": bool(_attention_calls(answered("llama host"))),
        "static": bool(answered("llama host").calls("mark_static_address")),
        "weights": _graphs_that_share_weights(answered("llama host")) > 1,
        "memory": bool(answered("whole device").calls("kv_memory")),
    }
    theirs = {name for name, source in rule_table().items() if source == "vendor"}
    assert {name for name, met in checks.items() if met} == theirs


def _hits(run: Answered) -> set[bool]:
    """Of graphs that are cached: those of their sampler are not."""
    return {line["hit"] for line in run.calls("compile") if "cache_dir" in line["options"]}


def _calls_op(run: Answered, wanted: str) -> bool:
    return any(name == wanted for line in run.calls("compile") for name, _ in line["sdk_ops"])


def _attention_calls(run: Answered) -> list[object]:
    calls = [call for line in run.calls("compile") for call in line["sdk_ops"]]
    return [call for call in calls if "attention" in call[0]]


def _graphs_that_share_weights(run: Answered) -> int:
    """Graphs in which the name of a weight of the first one comes again."""
    names = [
        {given["name"] for given in line["inputs"] if given["kind"] == "weight"}
        for line in run.calls("compile")
    ]
    return sum(bool(seen & names[0]) for seen in names)
