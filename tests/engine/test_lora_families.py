"""Adapters of many families, on every projection that they have, give merged weights' tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.adapters import make_adapter, merge
from tests.checkpoint_families import FAMILIES
from tests.engine.conftest import Engines
from tests.engine.test_equality import make_prompts
from tests.engine.test_families import BATCHES, CHUNKS, references, running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.wide,
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
]

NUM_TOKENS = 24
# Those that vLLM does not adapt, and a layer of a family that it leaves out.
REFUSED = ("falcon", "falcon_new", "gpt2", "gpt_neox", "gptj", "stablelm")
LEFT_OUT = {"gpt_bigcode": "c_attn"}
# Models of vLLM's Transformers backend, which has shared experts inside the layer of experts.
FUSED = ("dots1",)
NO_PROJECTIONS = re.compile(r"embed|wte|wpe|norm|router|mlp\.gate\.|moe\.gate\.|\bln_|_gate\.")


def projections(checkpoint: Path, arch: str) -> list[str]:
    """The last parts of the names of all matrices that adapters may change."""
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        names = [n for n in file.keys() if len(file.get_slice(n).get_shape()) == 2]  # noqa: SIM118
    wanted = (name for name in names if not NO_PROJECTIONS.search(name))
    found = {name.removesuffix(".weight").rpartition(".")[2] for name in wanted}
    return sorted(found - {LEFT_OUT.get(arch)})


def kind_of_experts(checkpoint: Path) -> Any:
    """Names of the experts in an adapter of a checkpoint."""
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        stacked = any(name.endswith("experts.down_proj") for name in file.keys())  # noqa: SIM118
    return "stacked" if stacked else "single"


def leave_out(adapter: Path, part: str) -> None:
    """Take the matrices whose names have `part` out of an adapter."""
    file = adapter / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if part not in name}, file)


@pytest.mark.parametrize("arch", sorted(FAMILIES))
def test_a_family(engines: Engines, tmp_path: Path, arch: str) -> None:
    checkpoint = engines.checkpoints(arch)
    targets, experts = projections(checkpoint, arch), kind_of_experts(checkpoint)
    adapter = make_adapter(checkpoint, tmp_path / "adapter", targets=targets, experts=experts)
    if arch in FUSED:
        leave_out(adapter, ".shared_experts.")
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    prompts = make_prompts([5, 49, 130], seed=61)
    expected = references(merged, prompts, NUM_TOKENS)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = LoRARequest("adapter", 1, str(adapter))
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    options = {"enable_lora": True, "max_loras": 2}
    if arch in REFUSED:
        with (
            pytest.raises(ValueError, match="models that vLLM does not adapt"),
            running(engines, arch, tmp_path, CHUNKS, BATCHES, **options),
        ):
            pass
        return
    with running(engines, arch, tmp_path, CHUNKS, BATCHES, **options) as engine:
        outputs = engine.llm.generate(inputs, params, use_tqdm=False, lora_request=request)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens == [reference.token_ids for reference in expected]
