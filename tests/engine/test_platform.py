"""Refusals of the platform before weights load, and vLLM's own start with the plugin."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.platform import RblnPlatform
from rbln_backend.refusals import refuse_unsupported
from rbln_backend.settings import configured
from tests.checkpoint_families import LAYERS
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import write_medusa
from tests.engine.conftest import DEFAULTS, Engines
from tests.engine.script import run_script
from tests.engine.support import FEW, make_prompts
from tests.graph_cache import graph_cache
from tests.quantized_checkpoints import Recipe, quantization_config
from tests.reference import reference_generate

pytestmark = pytest.mark.engine


DRAFTS = {"method": "suffix", "num_speculative_tokens": 2}
DRAFT_OPTIONS = {"draft_sample_method", "draft_tensor_parallel_size", "max_model_len"}


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY", "fibonacci", "exponential"),
        ("VLLM_RBLN_DECODE_BATCH_BUCKET_LIMIT", "many", "many"),
        ("VLLM_RBLN_ENABLE_WARM_UP", "maybe", "maybe"),
        ("VLLM_RBLN_USE_VLLM_MODEL", "0", "optimum"),
        ("VLLM_RBLN_ENABLE_WARMUP", "1", "VLLM_RBLN_ENABLE_WARM_UP"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable) as caught:
        engines.fresh("llama")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"enable_lora": True, "lora_target_modules": ["q_proj", "embed_tokens"]},
            "LoRA adapters of embeddings",
        ),
        ({"enable_lora": True, "lora_dtype": "bfloat16"}, "another dtype than the model"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
            "Disabling chunked prefill is not supported",
        ),
        ({"pipeline_parallel_size": 8}, "--max-num-seqs 4 is below --pipeline-parallel-size 8"),
        (
            {"tensor_parallel_size": 2, "nnodes": 2},
            "ranks on other hosts that neither Ray nor --headless starts",
        ),
        ({"enable_lora": True, "fully_sharded_loras": True}, "LoRA adapters that are split twice"),
        ({"ubatch_size": 2}, "batches that are run in two halves"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 4}, "context parallelism"),
        (
            {"structured_outputs_config": {"backend": "guidance"}},
            "--structured-outputs-config.backend must be auto or xgrammar",
        ),
        (
            {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2}},
            "speculative decoding with this method",
        ),
        (
            {"speculative_config": DRAFTS, "runner": "pooling", "convert": "embed"},
            "speculative decoding of a model that pools",
        ),
        (
            {"speculative_config": DRAFTS, "rbln": {"use_custom_kernel": True}},
            "speculative decoding with RBLN_USE_CUSTOM_KERNEL",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    engines: Engines, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        engines.fresh("llama", **options)


def test_a_whole_draft_model_is_refused(engines: Engines) -> None:
    own = str(engines.checkpoints("llama"))
    settings = {"method": "draft_model", "model": own, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="method 'draft_model': speculative decoding with this"):
        engines.fresh("llama", speculative_config=settings)


def test_drafts_of_stages_on_ray_are_refused(engines: Engines) -> None:
    stages = {"pipeline_parallel_size": 2, "speculative_config": DRAFTS}
    checkpoint = str(engines.checkpoints("llama"))
    config = EngineArgs(checkpoint, **DEFAULTS, **stages).create_engine_config()
    # vLLM takes the name only where Ray is installed.
    config.parallel_config.distributed_executor_backend = "ray"
    with pytest.raises(ValueError, match="--distributed-executor-backend ray: speculative"):
        refuse_unsupported(config, configured(config))


def _layers(number: int) -> dict[str, Any]:
    """Return options of an engine whose checkpoint says that it has so many MTP layers."""
    return {"hf_overrides": {"num_nextn_predict_layers": number}}


def _quantized(recipe: Recipe) -> dict[str, Any]:
    """Return options of an engine whose checkpoint says that it is quantised and has a layer."""
    fields = {"quantization_config": quantization_config(recipe)}
    return {"hf_overrides": {"num_nextn_predict_layers": 1, **fields}}


@pytest.mark.parametrize(
    ("arch", "options", "text"),
    [
        ("llama", {}, "served model LlamaForCausalLM, draft model Glm4MoeMTPModel: MTP with this"),
        ("glm4_moe", _layers(0), "num_nextn_predict_layers 0: MTP with this model"),
        ("glm4_moe", _layers(2), "num_nextn_predict_layers 2: MTP with this model"),
        (
            "glm4_moe",
            {},
            rf"num_speculative_tokens 2: .* not initialized .*model\.layers\.{LAYERS}",
        ),
        (
            "glm4_moe",
            _quantized(Recipe(bits=4)),
            "Glm4MoeForCausalLM with quantization 'compressed-tensors pack-quantized': MTP with",
        ),
        ("glm4_moe", {"enable_lora": True}, "'mtp' with enable_lora true"),
    ],
)
def test_mtp_is_refused_where_it_is_not_proven(
    engines: Engines, arch: str, options: dict[str, Any], text: str
) -> None:
    drafts = str(engines.checkpoints("glm4_moe"))
    settings = {"method": "mtp", "model": drafts, "num_speculative_tokens": 2}
    with pytest.raises((ValueError, UnsupportedModelError), match=text):
        engines.fresh(arch, speculative_config=settings, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tensor_parallel_size": 2, "draft_tensor_parallel_size": 1},
            "draft_tensor_parallel_size 1 with tensor_parallel_size 2: this option of a draft",
        ),
        ({"enable_lora": True}, "method 'medusa' with enable_lora true: a draft model"),
        ({"rbln": {"kv_tier_memory_bytes": 1 << 24}}, "method 'medusa' with KV tiers: a draft"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method 'probabilistic': this"),
        ({"max_model_len": 64}, "--speculative-config max_model_len 64: this option of a draft"),
        ({"sizes": {"hidden_size": 32}}, "hidden_size must be the served model's, 128, got 32"),
        ({"sizes": {"truncated_vocab_size": 64}}, "truncated_vocab_size must be vocab_size"),
    ],
)
def test_draft_models_are_refused_where_they_are_not_proven(
    engines: Engines, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    drafts = write_medusa(tmp_path, **options.get("sizes", {}))
    own = {name: options[name] for name in DRAFT_OPTIONS & options.keys()}
    options = {n: value for n, value in options.items() if n not in (*DRAFT_OPTIONS, "sizes")}
    settings = {"method": "medusa", "model": str(drafts), "num_speculative_tokens": 2}
    with pytest.raises((ValueError, UnsupportedModelError), match=text):
        engines.fresh("llama", speculative_config=settings | own, **options)


@pytest.mark.parametrize(
    ("arch", "own", "options", "text"),
    [
        ("qwen2", "llama", {}, "served model Qwen2ForCausalLM: EAGLE with this model"),
        ("phi3", "llama", {"method": "eagle3"}, "served model Phi3ForCausalLM: EAGLE with this"),
    ],
)
def test_eagle_is_refused_for_other_models(
    engines: Engines, arch: str, own: str, options: dict[str, Any], text: str
) -> None:
    drafts, options = str(engines.checkpoints(own)), dict(options)
    method = options.pop("method", "eagle")
    settings = {"method": method, "model": drafts, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=text):
        engines.fresh(arch, speculative_config=settings, **options)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_key_value_heads": 1}, "draft model with 1 KV heads of 32, served model with 2 KV"),
        ({"max_position_embeddings": 128}, "draft model of 128 tokens, --max-model-len 256"),
        ({"hidden_size": 64}, "hidden_size must be the served model's, 128, got 64"),
    ],
)
def test_a_layer_of_another_size_is_refused(
    engines: Engines, tmp_path: Path, fields: dict[str, int], text: str
) -> None:
    config = json.loads((engines.checkpoints("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    settings = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises((ValueError, UnsupportedModelError), match=text):
        engines.fresh("llama", speculative_config=settings)


def test_a_switch_of_npus_alone_is_reported(
    checkpoints: CheckpointCache, caplog: pytest.LogCaptureFixture
) -> None:
    options = DEFAULTS | {"additional_config": {"rbln": {"use_w8a8": True}}}
    EngineArgs(model=str(checkpoints("llama")), **options).create_engine_config()
    reports = [r.getMessage() for r in caplog.records if "use_w8a8" in r.getMessage()]
    assert reports == ["use_w8a8 has no effect: the emulated device does not round inputs"]


def test_the_profiler_excludes_model_parallelism(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RBLN_PROFILER", "1")
    message = "RBLN_PROFILER is not supported when using vLLM model parallel"
    with pytest.raises((RuntimeError, ValueError), match=message):
        engines.fresh("llama", tensor_parallel_size=2)


def test_a_profile_is_written(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RBLN_PROFILER", "1")
    rbln = FEW | {"cache_root": str(tmp_path)}
    checkpoint = engines.checkpoints("llama", num_hidden_layers=1)
    engine = engines.fresh(checkpoint=checkpoint, rbln=rbln)
    engine.core.profile(True)
    engine.generate([[5, 6, 7]], None)
    engine.core.profile(False)
    (trace,) = (tmp_path / "rbln" / "profile").glob("*.trace.json")
    assert "rbln_emulator::self_attention" in trace.read_text()


# exaone4 has layers of both kinds.
@pytest.mark.parametrize("arch", [pytest.param("llama", marks=pytest.mark.wide), "exaone4"])
def test_the_custom_kernel_computes_the_same(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setenv("RBLN_USE_CUSTOM_KERNEL", "1")
    engine = engines.fresh(arch, rbln=FEW)
    prompt = make_prompts([90], seed=300)[0]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = reference_generate(engine.checkpoint, prompt, 20).token_ids
    # The second request resumes from what the first one left.
    for cached in (0, 80):
        (output,) = engine.generate([prompt], params)
        assert output.num_cached_tokens == cached
        assert list(output.outputs[0].token_ids) == expected


CLASS = "GPTNeoXForCausalLM"


def test_model_classes_are_looked_at_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts a Python for each that a cache root has not seen, which takes seconds."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    RblnPlatform.pre_register_and_update()
    monkeypatch.setattr(subprocess, "run", refuse)
    unseen = registry._LazyRegisteredModel
    monkeypatch.setattr(unseen, "_load_modelinfo_from_cache", lambda *_: None)
    model = unseen("vllm.model_executor.models.gpt_neox", CLASS)
    assert model.inspect_model_cls().architecture == CLASS


def test_one_block_per_request(engines: Engines) -> None:
    """block_size == max_model_len takes the ops that know no paging."""
    engine = engines.fresh("llama", block_size=256, rbln=FEW)
    prompt = make_prompts([90], seed=301)[0]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (output,) = engine.generate([prompt], params)
    expected = reference_generate(engine.checkpoint, prompt, 20).token_ids
    assert list(output.outputs[0].token_ids) == expected


OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    path, options, prompt = json.loads(sys.argv[1])
    llm = LLM(path, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    from vllm.platforms import current_platform
    print("RESULT", json.dumps([type(current_platform).__name__, output.outputs[0].token_ids]))
"""


def test_plain_vllm_uses_the_plugin_in_its_own_engine_process(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    checkpoint = checkpoints("llama")
    prompt = make_prompts([30], seed=302)[0]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_PLUGINS": "rbln", "VLLM_CACHE_ROOT": str(graph_cache())}
    # A new Python, which has to find the plugin.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    argument = [str(checkpoint), DEFAULTS, prompt]
    platform, token_ids = run_script(script, argument, environment)
    assert platform == "RblnPlatform"
    assert token_ids == reference_generate(checkpoint, prompt, 12).token_ids
