"""The double computes what its ops say, and refuses what its rules say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.script import run_script
from tests.sdk_double.launch import FOLDER, double_environment, read_log

RIGHT = (
    "a_prompt_in_chunks_and_a_decode",
    "a_decode_of_several_tokens_across_blocks",
    "a_copy_of_a_block",
    "both_ops_of_a_window",
    "experts_of_one_rank_of_two",
    "experts_of_one_chain",
    "experts_of_fp8_in_blocks",
    "a_weight_written_after_it_was_loaded",
    "an_assignment_into_a_tensor",
    "models_that_name_weights_alike",
    "projections_that_are_seen_as_rows",
    "outputs_in_the_same_memory",
)
BROKEN = {
    "a_block_of_another_size": "rule 'blocks'.* 256",
    "a_chunk_that_does_not_divide_the_block": "rule 'blocks'.* chunk of 96",
    "a_decode_that_ends_behind_its_table": "rule 'positions'.* ends at 513, its table at 512",
    "gradients_on": "rule 'no_grad'",
    "nodes_without_values": "rule 'meta'.* 1 of 1 nodes have none",
    "an_operator_with_its_overload": r"rule 'names'.* relu_default calls aten\.relu\.default",
    "an_unknown_option": "rule 'options'.* 'number_of_devices'",
    "a_mode_that_is_no_list": "rule 'options'.* mode is 'strict', a str",
    "a_cache_on_the_host": "rule 'static'.* layer is on cpu",
    "a_cache_that_is_an_input": "rule 'static'.* KV cache .* is host",
    "too_few_arguments": "missing value for argument 'sinks'",
    "an_index_of_32_bits": "rule 'schema'.* seq_idx is int32",
    "a_weight_that_is_transposed": r"rule 'contiguous'.* weight has the strides \[1, 3\]",
    "projections_that_are_computed_in_rows": r"rule 'axes'.* rows is \[128, 8, 32\] before",
    "experts_of_a_wider_table": r"rule 'routing'.* pad is 'pad' before found",
    "experts_of_compared_numbers": r"rule 'routing'.* eq is 'eq' before found",
    "experts_of_the_whole_softmax": r"rule 'routing'.* gets what \[\] give",
    "two_inputs_in_the_same_memory": "rule 'aliases'.* share memory",
    "an_input_of_unknown_source": "rule 'marks'.* x has no source",
    "a_weight_without_a_mark": r"rule 'marks'.* L\['weight'\] has \(None, None\), not unguarded",
    "a_buffer_without_a_mark": r"rule 'marks'.* L\['weight'\] has \(None, None\), not unguarded",
    "a_step_input_with_a_mark": r"rule 'marks'.* L\['x'\] has \('unguarded', .*, not None twice",
    "two_names_of_one_weight": r"rule 'weights'.* l_bias_ was l_weight_ in another graph",
    "two_weights_of_one_name": r"rule 'weights'.* l_weight_ is \[3\] here and was \[\[2\]\]",
}


def run_cases(log: Path, names: list[str], **settings: str | int) -> dict[str, str | None]:
    """The named cases in one process over the double with these settings."""
    environment = double_environment(log, **settings)
    script = FOLDER / "cases.py"
    outcomes: dict[str, str | None] = run_script(script, names, environment, timeout_s=280)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    log = tmp_path_factory.mktemp("double") / "log.jsonl"
    return run_cases(log, [*RIGHT, *BROKEN])


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_called_rightly_is_computed_rightly(
    name: str, outcomes: dict[str, str | None]
) -> None:
    assert outcomes[name] is None


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str, outcomes: dict[str, str | None]) -> None:
    with pytest.raises(RuntimeError, match=BROKEN[name]):
        raise RuntimeError(outcomes[name])


def test_without_an_npu_graphs_are_compiled_but_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a_graph_that_is_called", "a_graph_that_is_only_compiled"]
    nameless = run_cases(tmp_path / "nameless.jsonl", names, npu="")
    assert all("no NPU is here to compile for" in str(results) for results in nameless.values())
    monkeypatch.setenv("RBLN_FORCE_NPU_NAME", "RBLN-CR13")
    named = run_cases(tmp_path / "named.jsonl", names, npu="")
    assert "1 RBLN devices are needed, 0 are visible" in str(named["a_graph_that_is_called"])
    assert named["a_graph_that_is_only_compiled"] is None
    (compiled, *_) = read_log(tmp_path / "named.jsonl", "compile")
    assert compiled["npu"] == "RBLN-CR13"


def test_memory_is_finite_and_the_sdk_says_so_in_its_words(tmp_path: Path) -> None:
    results = run_cases(tmp_path / "log.jsonl", ["a_cache_of_any_size"], memory=1 << 20)
    assert "SYS_ENOMEM: Out of memory" in str(results["a_cache_of_any_size"])


def test_a_rule_can_be_switched_off(tmp_path: Path) -> None:
    results = run_cases(tmp_path / "log.jsonl", list(BROKEN), off="blocks,schema")
    off = {name for name, message in results.items() if message is None}
    expected = {"a_block_of_another_size", "a_chunk_that_does_not_divide_the_block"}
    assert off == expected | {"too_few_arguments", "an_index_of_32_bits"}
