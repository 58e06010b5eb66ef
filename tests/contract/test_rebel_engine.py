"""A whole engine on the ``rebel`` device, with the documented SDK played by the stand-in.

The stand-in runs on the CPU what it is asked to compile, so the tokens can be compared. It shows
that the worker reaches the SDK as documented; it says nothing about an NPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.contract.test_rebel_compiler import install_sdk
from tests.engine.conftest import DEFAULTS
from tests.engine.script import run_script
from tests.engine.test_equality import make_prompts
from tests.kernel_cache import share_kernels
from tests.quantized_checkpoints import CHANNEL, Recipe, make_quantized_checkpoint
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

SCRIPT = """
import json, os, sys
from pathlib import Path

from vllm import LLM, SamplingParams

import rbln_backend.attention.ops
from rbln_backend.emulator.kernel_set import load_kernels

path, options, prompt, cache_root = json.loads(sys.argv[1])
# The stand-in has no attention of its own: it borrows the CPU bodies of the ops.
load_kernels(Path(cache_root), "native")
llm = LLM(path, **options)
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)

from rebel.core import torch_compile

graph, inputs, kwargs = torch_compile.CALLS[0]
nodes = graph.graph.nodes
seen = {
    "calls": len(torch_compile.CALLS),
    "weights_inside": len(list(graph.buffers())),
    "inputs": len(inputs),
    "caches": len(kwargs["options"]["compile_context"].static),
    "emulated": any("rbln_emulator" in str(node.target) for node in nodes),
    "quant_bits": os.environ.get("RBLN_QUANT_BITS"),
    "ops": sorted({str(n.target).split(".")[1] for n in nodes if "custom_ops" in str(n.target)}),
    "arguments": sorted({len(n.args) + len(n.kwargs) for n in nodes if "sliding" in str(n.target)}),
}
print("RESULT", json.dumps([output.outputs[0].token_ids, seen]))
"""


def run_engine(
    checkpoint: Path, tmp_path: Path, prompt: list[int]
) -> tuple[list[int], dict[str, Any]]:
    """Tokens of a greedy request on the stand-in SDK, and what the SDK was asked to compile."""
    install_sdk(tmp_path / "sdk", "RBLN-CR13")
    root = share_kernels(tmp_path / "cache")
    options = DEFAULTS | {"additional_config": {"rbln": {"cache_root": str(root)}}}
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    environment = dict(os.environ) | {
        # The second one is this tree, wherever the package was installed from.
        "PYTHONPATH": os.pathsep.join((str(tmp_path / "sdk"), str(ROOT))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    argument = [str(checkpoint), options, prompt, str(root)]
    token_ids, seen = run_script(script, argument, environment)
    return token_ids, seen


def test_the_worker_drives_the_documented_interface(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("llama")
    prompt = make_prompts([90], seed=400)[0]
    token_ids, seen = run_engine(checkpoint, tmp_path, prompt)
    assert token_ids == reference_generate(checkpoint, prompt, 12).token_ids
    assert seen["calls"] == 7, "every graph of the warm-up plan, and none after"
    assert seen["weights_inside"] > seen["caches"] > 0
    # Tokens, positions, token index, sequence indices, block table; and one cache per layer.
    assert seen["inputs"] == 5 + seen["caches"]
    assert not seen["emulated"], "a real device gets vLLM's operators, not the emulator's kernels"


@pytest.mark.wide
def test_window_layers_are_compiled_as_the_documented_ops(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("exaone4")
    prompt = make_prompts([90], seed=401)[0]
    token_ids, seen = run_engine(checkpoint, tmp_path, prompt)
    assert token_ids == reference_generate(checkpoint, prompt, 12).token_ids
    assert seen["ops"] == [
        "flash_causal_attention_naive_prefill",
        "sliding_window_attention_naive_prefill",
    ]
    # q, k, v, kv_cache, cache_seq_len, cache_offset, scale, block_tables, dummy; nothing of ours.
    assert seen["arguments"] == [9]
    assert not seen["emulated"]


def test_soft_caps_are_refused_where_the_ops_have_none(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"'rebel', cap 4\.0: attention logit soft capping"):
        run_engine(checkpoints("gemma2"), tmp_path, [5, 6, 7])


def test_experts_are_compiled_as_the_documented_op(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("qwen3_moe")
    prompt = make_prompts([90], seed=402)[0]
    token_ids, seen = run_engine(checkpoint, tmp_path, prompt)
    assert token_ids == reference_generate(checkpoint, prompt, 12).token_ids
    assert "custom_moe_glu" in seen["ops"]
    assert not seen["emulated"]


@pytest.mark.wide
def test_experts_that_the_op_does_not_know_are_plain_operators(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("gpt_oss")
    prompt = make_prompts([90], seed=403)[0]
    token_ids, seen = run_engine(checkpoint, tmp_path, prompt)
    assert token_ids == reference_generate(checkpoint, prompt, 12).token_ids
    assert "custom_moe_glu" not in seen["ops"]
    assert not seen["emulated"]


@pytest.mark.wide
@pytest.mark.parametrize(
    "recipe",
    [Recipe(bits=4, group_size=128), Recipe(format="gptq", bits=8, group_size=CHANNEL)],
    ids=str,
)
def test_quantised_weights_are_plain_operators(recipe: Recipe, tmp_path: Path) -> None:
    checkpoint = make_quantized_checkpoint("llama", tmp_path / "quantized", recipe)
    prompt = make_prompts([90], seed=404)[0]
    token_ids, seen = run_engine(checkpoint, tmp_path, prompt)
    assert token_ids == reference_generate(checkpoint / "plain", prompt, 12).token_ids
    assert seen["quant_bits"] == str(recipe.bits)
    assert not seen["emulated"]


@pytest.mark.wide
def test_what_the_sdk_has_no_words_for_is_refused(tmp_path: Path) -> None:
    two_widths = make_quantized_checkpoint("llama", tmp_path / "head", Recipe(bits=4, head_bits=8))
    with pytest.raises(AssertionError, match=r"weights of 4 and of 8 bits.*RBLN_QUANT_BITS"):
        run_engine(two_widths, tmp_path, [5, 6, 7])
    experts = make_quantized_checkpoint(
        "qwen3_moe", tmp_path / "experts", Recipe(), moe_intermediate_size=128
    )
    with pytest.raises(AssertionError, match="quantised experts in this form"):
        run_engine(experts, tmp_path, [5, 6, 7])
