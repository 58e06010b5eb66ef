"""Adapters of experts and LM heads in a running engine are worth their merged weights."""

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.adapters import ATTENTION, EVERY_LINEAR, HEAD, MLP, make_adapter, merge
from tests.checkpoint_families import FAMILIES
from tests.checkpoints import CheckpointCache
from tests.engine import parallel_runs
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import run_ranks
from tests.engine.support import FEW, make_prompts
from tests.engine.test_families import BATCHES, CHUNKS, references, running
from tests.engine.test_lora import LORA, NUM_TOKENS, bits, generate, tokens, worker
from tests.engine.test_parallel import DATA, FEW_GRAPHS, PIPELINE, TENSOR
from tests.graph_cache import graph_cache
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

EXPERTS = (*EVERY_LINEAR, *HEAD, "w1", "w2", "w3")
wide = pytest.mark.wide
_numbers = count(1)


def check_batch(engine: Engine, adapters: dict[int, Path], tmp_path: Path) -> None:
    """Adapters, none and one that leaves experts alone in a batch: right, and as they are alone."""
    prompts = make_prompts([21, 64, 5, 40], seed=71)
    chosen = [1, 0, 2, 1]
    # Cached blocks know the load of an adapter by its number.
    loads = {n: LoRARequest(f"a{n}", next(_numbers), str(path)) for n, path in adapters.items()}
    requests = [loads.get(n) for n in chosen]
    together = generate(engine, prompts, requests)
    paths = {
        n: merge(engine.checkpoint, adapter, tmp_path / f"merged-{n}")
        for n, adapter in adapters.items()
    }
    paths[0] = engine.checkpoint
    for prompt, number, request, output in zip(prompts, chosen, requests, together, strict=True):
        expected = reference_generate(paths[number], prompt, NUM_TOKENS)
        assert tokens([output]) == [expected.token_ids]
        if number:
            plain = reference_generate(paths[0], prompt, NUM_TOKENS).token_ids
            assert plain != expected.token_ids
        engine.llm.reset_prefix_cache()
        (alone,) = generate(engine, [prompt], [request])
        assert bits(alone) == bits(output)
    assert engine.total("rbln_recompiles_after_warmup_total") == 0
    for number in worker(engine).list_loras():
        assert worker(engine).remove_lora(number)


@pytest.mark.parametrize(
    ("arch", "experts", "options"),
    [
        ("qwen3_moe", "single", {}),
        ("gpt_oss", "stacked", {}),
        pytest.param("qwen3_moe", "stacked", {}, marks=wide),
        pytest.param("mixtral", "single", {}, marks=wide),
        pytest.param("qwen2_moe", "single", {}, marks=wide),
        pytest.param("llama4", "stacked", {}, marks=wide),
        pytest.param("qwen3_moe", "single", {"moe_use_opt_kernel": False}, marks=wide),
        pytest.param(
            "gpt_oss",
            "stacked",
            {"moe_use_opt_kernel": False, "moe_custom_kernel": False},
            marks=wide,
        ),
    ],
)
def test_experts_and_head(
    engines: Engines, tmp_path: Path, arch: str, experts: Any, options: dict[str, Any]
) -> None:
    checkpoint = engines.checkpoints(arch)
    every = make_adapter(
        checkpoint, tmp_path / "1", rank=8, targets=EXPERTS, experts=experts, seed=1
    )
    some = make_adapter(checkpoint, tmp_path / "2", rank=3, targets=ATTENTION[:1], seed=2)
    engine = engines(arch, **LORA, rbln=FEW | options)
    check_batch(engine, {1: every, 2: some}, tmp_path)


def _keep(path: Path, *words: str) -> None:
    """Leave an adapter only the matrices whose name has one of `words`."""
    file = path / "adapter_model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if any(word in name for word in words)}
    save_file(kept, file)


def _stacked_and_single(engine: Engine, folder: Path) -> list[Path]:
    """One adapter of Mixtral's experts, as PEFT writes it for transformers 5 and for 4."""
    rank, config = 4, engine.core.vllm_config.model_config.hf_config
    hidden, inner = config.hidden_size, config.intermediate_size
    experts = config.num_local_experts
    stacked, single = {}, {}
    for layer in range(config.num_hidden_layers):
        parent = f"base_model.model.model.layers.{layer}"
        sizes = {".base_layer": (hidden, 2 * inner), "": (inner, hidden)}
        for suffix, (inputs, outputs) in sizes.items():
            a = torch.randn(experts, rank, inputs) * inputs**-0.5
            b = torch.randn(outputs, rank, experts) * 0.2
            stack = f"{parent}.mlp.experts{suffix}"
            stacked[f"{stack}.lora_A.weight"] = a.flatten(0, 1)
            stacked[f"{stack}.lora_B.weight"] = b.flatten(1)
            names = ("w1", "w3") if suffix else ("w2",)
            for number in range(experts):
                for name, part in zip(names, b[..., number].chunk(len(names)), strict=True):
                    one = f"{parent}.block_sparse_moe.experts.{number}.{name}"
                    single[f"{one}.lora_A.weight"] = a[number].clone()
                    single[f"{one}.lora_B.weight"] = part.contiguous()
    paths = []
    for name, tensors in (("stacked", stacked), ("single", single)):
        named = {"target_modules": [] if name == "stacked" else ["w1", "w2", "w3"]}
        made = make_adapter(engine.checkpoint, folder / name, rank=rank, targets=(), **named)
        save_file(tensors, made / "adapter_model.safetensors")
        paths.append(made)
    return paths


def test_stacks_of_a_block_that_transformers_renamed(engines: Engines, tmp_path: Path) -> None:
    one_layer = engines.checkpoints("mixtral", num_hidden_layers=1)
    engine = engines.fresh(checkpoint=one_layer, **LORA, rbln=FEW)
    torch.manual_seed(3)
    requests = [
        LoRARequest(path.name, next(_numbers), str(path))
        for path in _stacked_and_single(engine, tmp_path)
    ]
    (prompt,) = make_prompts([21], seed=73)
    outputs = [generate(engine, [prompt], [request])[0] for request in (*requests, None)]
    assert bits(outputs[0]) == bits(outputs[1])
    assert tokens([outputs[0]]) != tokens([outputs[2]])
    for number in worker(engine).list_loras():
        assert worker(engine).remove_lora(number)


def test_one_matrix_of_one_expert(engines: Engines, tmp_path: Path) -> None:
    engine = engines("qwen3_moe", **LORA, rbln=FEW)
    one = make_adapter(engine.checkpoint, tmp_path / "1", rank=16, targets=MLP, experts="single")
    _keep(one, "experts.3.up_proj", "layers.1.mlp.experts.5.down_proj")
    stack = make_adapter(engine.checkpoint, tmp_path / "2", rank=2, targets=(), experts="stacked")
    _keep(stack, "experts.lora_")
    check_batch(engine, {1: one, 2: stack}, tmp_path)


# ------------------------------------------------------------------------------------ lora families
FAMILY_TOKENS = 24
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
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        stacked = any(name.endswith("experts.down_proj") for name in file.keys())  # noqa: SIM118
    return "stacked" if stacked else "single"


def leave_out(adapter: Path, part: str) -> None:
    """Take the matrices whose names have `part` out of an adapter."""
    file = adapter / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if part not in name}, file)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("arch", sorted(FAMILIES))
def test_a_family(engines: Engines, tmp_path: Path, arch: str) -> None:
    checkpoint = engines.checkpoints(arch)
    targets, experts = projections(checkpoint, arch), kind_of_experts(checkpoint)
    adapter = make_adapter(checkpoint, tmp_path / "adapter", targets=targets, experts=experts)
    if arch in FUSED:
        leave_out(adapter, ".shared_experts.")
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    prompts = make_prompts([5, 49, 130], seed=61)
    expected = references(merged, prompts, FAMILY_TOKENS)
    params = SamplingParams(temperature=0.0, max_tokens=FAMILY_TOKENS, ignore_eos=True)
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


# --------------------------------------------------------------------------------------- lora ranks
RANK_LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
PROMPTS = make_prompts([1, 65, 130, 66], seed=510)
# Both ranks have the only key head; a layer whose file has one matrix for q, k and v.
ONE_KEY_HEAD = {"num_key_value_heads": 1}
TARGETS = {"phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}
RANK_EXPERTS: dict[str, Any] = {"qwen3_moe": "single", "gpt_oss": "stacked"}
WHOLE_EXPERTS = {"enable_expert_parallel": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "fields", "options"),
    [
        ("llama", ONE_KEY_HEAD | {"num_hidden_layers": 2}, TENSOR | FEW_GRAPHS),
        pytest.param("llama", {}, PIPELINE, marks=wide),
        pytest.param("llama", {}, TENSOR | PIPELINE, marks=wide),
        pytest.param("llama", {}, DATA, marks=wide),
        pytest.param("qwen3", {}, TENSOR | DATA, marks=wide),
        pytest.param("phi3", {}, TENSOR, marks=wide),
        pytest.param("qwen3_moe", {}, TENSOR, marks=wide),
        pytest.param("qwen3_moe", {}, TENSOR | WHOLE_EXPERTS, marks=wide),
        pytest.param("gpt_oss", {}, TENSOR, marks=wide),
        pytest.param("gpt_oss", {}, TENSOR | WHOLE_EXPERTS, marks=wide),
        pytest.param("gpt_oss", {}, PIPELINE, marks=wide),
    ],
)
def test_answers_are_those_of_merged_weights(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    arch: str,
    fields: dict[str, Any],
    options: dict[str, Any],
) -> None:
    checkpoint = checkpoints(arch, **fields)
    targets = (*TARGETS.get(arch, EVERY_LINEAR), *HEAD)
    experts = RANK_EXPERTS.get(arch, "no")
    one = make_adapter(
        checkpoint, tmp_path / "one", rank=16, seed=1, targets=targets, experts=experts
    )
    two = make_adapter(checkpoint, tmp_path / "two", rank=3, seed=2, targets=ATTENTION[-1:])
    adapters = [one, None, two, one]
    ranks = run_ranks(checkpoint, graph_cache(), PROMPTS, adapters=adapters, **options, **RANK_LORA)
    for number, (prompt, adapter, answer) in enumerate(zip(PROMPTS, adapters, ranks, strict=True)):
        path = checkpoint
        if adapter is not None:
            path = merge(checkpoint, adapter, tmp_path / f"merged-{number}")
        assert (
            answer["tokens"] == reference_generate(path, prompt, parallel_runs.NUM_TOKENS).token_ids
        ), number
