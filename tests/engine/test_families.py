"""Dense decoders of many families give the tokens of transformers, with no code of their own."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers import rotary_embedding

from rbln_backend.checkpoints.folders import fetch
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.graphs.cache import PROGRAM
from tests.adapters import make_adapter, merge
from tests.checkpoint_families import OTHERS, REQUIRED
from tests.checkpoints import make_checkpoint
from tests.draft_checkpoints import fitted_eagle3
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import NUM_TOKENS, assert_as_one_rank, run_ranks
from tests.engine.support import (
    FEW,
    GREEDY,
    assert_equal,
    assert_equals_reference,
    make_prompts,
    poison_padding,
)
from tests.engine.test_draft_models import speculation_of
from tests.engine.test_scheduling import greedy, tokens
from tests.graph_cache import graph_cache
from tests.minimax_checkpoint import AS_DEPLOYED, CACHE_SCALES, LAYERS, PROMPTS, make_minimax
from tests.multimodal_checkpoints import (
    CONFIGS,
    enclose_gemma3n,
    make_multimodal_checkpoint,
    name_as_in_memory,
)
from tests.reference import Reference, reference_generate

pytestmark = pytest.mark.engine

# One of each kind of attention, position and norm; the others are wide. The norms of qwen3 are in
# test_equality.py, llama is in most other tests. gemma3_text has windows and norms of its own,
# gpt_neox a partial rotation and parallel layers, opt learned positions.
ALWAYS = {"gemma3_text", "gpt_neox", "opt"}


LONGEST_PROMPT = 4 * 48
FAMILY_TOKENS = 64
# No window but starcoder2's is a whole number of blocks, and olmo3's is less than one.
OPTIONS: dict[str, Any] = {"max_model_len": LONGEST_PROMPT + FAMILY_TOKENS, "block_size": 32}
# Few graphs: for a chunk shorter and one longer than every window, one request and more.
CHUNKS, BATCHES = [16, 64], [1, 4]
# Others than the checkpoints': heads that fill no vector, sizes that no tile divides.
SHAPES: list[dict[str, int]] = [
    {"hidden_size": 96, "intermediate_size": 328, "num_attention_heads": 3, "head_dim": 32},
    {"hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 2, "head_dim": 80},
    {"hidden_size": 192, "intermediate_size": 136, "num_attention_heads": 12, "head_dim": 16},
    {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64},
]
# The number of a shape, key-value heads and layers, and what follows from them in a family.
SHAPED: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama": (0, 1, 2, {}),
    "qwen2": (2, 4, 4, {}),
    "qwen3": (1, 1, 2, {}),
    "mistral": (2, 3, 2, {"sliding_window": 40}),
    "phi3": (1, 2, 2, {}),
    "gemma2": (2, 6, 4, {"query_pre_attn_scalar": 16}),
    "gemma3_text": (0, 1, 4, {"query_pre_attn_scalar": 32}),
    "starcoder2": (3, 2, 4, {"sliding_window": 64}),
    "exaone4": (2, 2, 4, {}),
    "olmo2": (0, 3, 2, {}),
    "olmo3": (3, 4, 4, {}),
    "granite": (1, 2, 4, {}),
    "opt": (2, 12, 2, {"ffn_dim": 136}),
    "gpt_neox": (3, 4, 2, {}),
    "gpt_bigcode": (0, 1, 2, {}),
    "bloom": (3, 4, 2, {}),
    "cohere2": (1, 1, 4, {}),
    "mixtral": (0, 1, 2, {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen3_moe": (2, 2, 2, {"num_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v3": (1, 2, 3, {"kv_lora_rank": 40, "q_lora_rank": 56, "head_dim": ...}),
}
# vLLM lets these layers look back one token more than transformers does.
DEVIATIONS: dict[str, dict[str, Any]] = {"cohere2": {"hf_overrides": {"sliding_window": 47}}}
# vLLM takes the error function for bloom's GELU, transformers its approximation by tanh.
TOLERANCES = {"bloom": 1e-2}


def families_greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=3)


def prompt_lengths(checkpoint: Path) -> list[int]:
    """One token, both sides of the window, up to four windows; 48 stands for a missing window."""
    config = json.loads((checkpoint / "config.json").read_text())
    window = config.get("sliding_window") or 48
    return [1, 5, window - 1, window, window + 1, 2 * window, 4 * window]


@contextmanager
def running(
    engines: Engines,
    arch: str,
    cache_root: Path,
    chunks: list[int],
    batches: list[int],
    **options: Any,
) -> Iterator[Engine]:
    """An engine that is gone afterwards: there are too many families to keep theirs."""
    rbln = {
        "cache_root": str(cache_root),
        "prefill_chunk_buckets": chunks,
        "decode_batch_bucket_strategy": "manual",
        "decode_batch_bucket_manual_buckets": batches,
        # Room for all prompts, so that each can be hit.
        "window_prefix_tokens": 4096,
    }
    # Tables that vLLM's models share within a process, and glm changes.
    rotary_embedding._ROPE_DICT.clear()
    engine = engines.fresh(arch, rbln=rbln, **(OPTIONS | DEVIATIONS.get(arch, {}) | options))
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def references(checkpoint: Path, prompts: list[list[int]], num_tokens: int) -> list[Reference]:
    """To be made before any engine: vLLM wraps the classes of transformers that it runs itself."""
    return [reference_generate(checkpoint, prompt, num_tokens) for prompt in prompts]


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=() if arch in ALWAYS else pytest.mark.wide) for arch in REQUIRED],
)
def test_a_family(engines: Engines, arch: str) -> None:
    checkpoint = engines.checkpoints(arch)
    prompts, params = (
        make_prompts(prompt_lengths(checkpoint), seed=60),
        families_greedy(FAMILY_TOKENS),
    )
    expected = references(checkpoint, prompts, FAMILY_TOKENS)
    root = graph_cache()
    with running(engines, arch, root, CHUNKS, BATCHES) as engine:
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        again = engine.generate(prompts, params)
    assert_equal(alone, expected)
    assert any(output.num_cached_tokens for output in again)
    assert_equal(again, expected)
    with running(engines, arch, root, CHUNKS, BATCHES) as engine:
        assert engine.total("rbln_compile_cache_requests_total", result="miss") == 0
        together = engine.generate(prompts, params)
    assert {output.num_cached_tokens for output in together} == {0}
    assert_equal(together, expected)


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.wide
@pytest.mark.parametrize("arch", SHAPED)
def test_a_family_of_another_shape(engines: Engines, tmp_path: Path, arch: str) -> None:
    shape, kv_heads, layers, fields = SHAPED[arch]
    overrides = SHAPES[shape] | {"num_key_value_heads": kv_heads, "num_hidden_layers": layers}
    checkpoint = engines.checkpoints(arch, **{**overrides, **fields})
    prompts, params = make_prompts([1, 2, 33, 64, 130, 257], seed=62), families_greedy(24)
    expected = references(checkpoint, prompts, 24)
    for misses in (True, False):
        # All of this project's own choices: chunks, buckets, kernels.
        engine = engines.fresh(
            arch,
            checkpoint=checkpoint,
            rbln={"cache_root": str(tmp_path)},
            max_model_len=512,
            **DEVIATIONS.get(arch, {}),
        )
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        together = engine.generate(prompts, params)
        missed = engine.total("rbln_compile_cache_requests_total", result="miss")
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        tolerance = TOLERANCES.get(arch, 1e-3)
        assert_equal(alone, expected, tolerance)
        assert_equal(together, expected, tolerance)
        assert bool(missed) is misses


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.wide
@pytest.mark.parametrize("arch", OTHERS)
def test_another_family(engines: Engines, tmp_path: Path, arch: str) -> None:
    checkpoint = engines.checkpoints(arch)
    prompts, params = make_prompts(prompt_lengths(checkpoint), seed=61), families_greedy(24)
    expected = references(checkpoint, prompts, 24)
    with running(engines, arch, tmp_path, CHUNKS[-1:], BATCHES[-1:]) as engine:
        together = engine.generate(prompts, params)
        again = engine.generate(prompts, params)
    tolerance = TOLERANCES.get(arch, 1e-3)
    assert_equal(together, expected, tolerance)
    assert_equal(again, expected, tolerance)
    # One each for prefill, decode and the logits of prompts.
    assert len(list(tmp_path.rglob(PROGRAM))) == 3, "every program can be stored"


# -------------------------------------------------------------------------------------- text models
# Windows and a projector; the positions of three axes.
USUAL = ("gemma3", "qwen2_5_vl")
MEMBERS = [
    pytest.param(name, marks=[] if name in USUAL else [pytest.mark.wide]) for name in CONFIGS
]
PROMPT_LENGTHS, TEXT_TOKENS = [1, 17, 64, 130], 24
TEXT_GREEDY = SamplingParams(temperature=0.0, max_tokens=TEXT_TOKENS, ignore_eos=True, logprobs=3)
TEXT = {"disable_mm": True}


def assert_equals_transformers(
    engines: Engines, checkpoint: Path, reference_of: Path | None = None
) -> None:
    engine = engines.fresh(checkpoint=checkpoint, rbln=TEXT | FEW)
    prompts = make_prompts(PROMPT_LENGTHS, seed=7)
    outputs = engine.generate(prompts, TEXT_GREEDY)
    assert_equals_reference(engine, prompts, outputs, TEXT_TOKENS, reference_of)
    weights = dict(engine.core.model_executor.driver_worker.worker.get_model().named_parameters())
    assert [name for name in weights if "vision" in name or "visual" in name] == []


@pytest.mark.parametrize("model_type", MEMBERS)
def test_tokens_are_transformers_own(model_type: str, engines: Engines, tmp_path: Path) -> None:
    assert_equals_transformers(engines, make_multimodal_checkpoint(model_type, tmp_path))


@pytest.mark.wide
def test_gemma3n_is_its_text_model(engines: Engines, tmp_path: Path) -> None:
    text = make_checkpoint("gemma3n_text", tmp_path / "text")
    assert_equals_transformers(engines, enclose_gemma3n(text, tmp_path / "whole"), text)


@pytest.mark.wide
@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "qwen2_vl"])
def test_weights_may_have_their_names_of_today(
    model_type: str, engines: Engines, tmp_path: Path
) -> None:
    checkpoint = make_multimodal_checkpoint(model_type, tmp_path)
    name_as_in_memory(checkpoint)
    assert_equals_transformers(engines, checkpoint)


@pytest.mark.wide
def test_adapters_name_the_layers_as_transformers_has_them(
    engines: Engines, tmp_path: Path
) -> None:
    checkpoint = make_multimodal_checkpoint("gemma3", tmp_path / "gemma3")
    name_as_in_memory(checkpoint)
    # The vision tower has none of these.
    adapter = make_adapter(checkpoint, tmp_path / "adapter", targets=("o_proj", "down_proj"))
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    engine = engines.fresh(checkpoint=checkpoint, rbln=TEXT, enable_lora=True)
    prompts = make_prompts(PROMPT_LENGTHS, seed=8)
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        TEXT_GREEDY,
        lora_request=LoRARequest("a", 1, str(adapter)),
        use_tqdm=False,
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        reference = reference_generate(merged, prompt, TEXT_TOKENS)
        assert list(output.outputs[0].token_ids) == reference.token_ids
        assert reference.token_ids != reference_generate(checkpoint, prompt, TEXT_TOKENS).token_ids


def test_text_models_need_the_option(engines: Engines, tmp_path: Path) -> None:
    checkpoint = make_multimodal_checkpoint("gemma3", tmp_path)
    with pytest.raises(ValueError, match=r"multimodal inputs: .*--language-model-only"):
        engines.fresh(checkpoint=checkpoint)


# ------------------------------------------------------------------------------------------- latent
LATENT_PROMPTS = make_prompts([1, 17, 64, 130], seed=70)


def test_tokens_equal_the_reference_also_after_a_prefix_hit(engines: Engines) -> None:
    engine = engines("deepseek_v3", rbln=FEW)
    assert_equals_reference(engine, LATENT_PROMPTS, engine.generate(LATENT_PROMPTS, GREEDY))
    # 48 compressed numbers and 16 rotated ones of a token, for four heads of 40 and 40.
    assert {cache.shape[1:] for cache in engine.kv_caches()} == {(1, 1, 1, 16, 64)}
    again = engine.generate(LATENT_PROMPTS, GREEDY)
    assert any(output.num_cached_tokens for output in again)
    assert_equals_reference(engine, LATENT_PROMPTS, again)


@pytest.mark.wide
def test_without_native_kernels(engines: Engines) -> None:
    engine = engines("deepseek_v2", rbln={"kernels": "aten"})
    assert_equals_reference(engine, LATENT_PROMPTS, engine.generate(LATENT_PROMPTS, GREEDY))


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ],
)
def test_ranks_say_what_one_says(
    engines: Engines, tmp_path: Path, options: dict[str, object]
) -> None:
    engine = engines("deepseek_v2_groups")
    answers = run_ranks(engine.checkpoint, tmp_path, LATENT_PROMPTS, **options)
    assert_as_one_rank(engine, LATENT_PROMPTS, answers, 1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rbln": {"use_custom_kernel": True}}, "take no compressed keys"),
        ({"enable_lora": True, "max_lora_rank": 8}, "adapters of models that vLLM does not adapt"),
    ],
)
def test_what_it_excludes_is_refused(
    engines: Engines, options: dict[str, object], text: str
) -> None:
    with pytest.raises((UnsupportedModelError, RuntimeError, ValueError), match=text):
        engines.fresh("deepseek_v2", **options)


# ------------------------------------------------------------------------------------------ gpt oss
GPT_TOKENS = 64
# One token, both sides of the window (48) and of a chunk (64), up to four windows: the context.
GPT_LENGTHS = [1, 2, 15, 47, 48, 49, 64, 65, 97, 145, 192]
GPT_GREEDY = SamplingParams(temperature=0.0, max_tokens=GPT_TOKENS, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize("kernels", ["native", pytest.param("aten", marks=pytest.mark.wide)])
def test_each_prompt_alone(engines: Engines, kernels: str) -> None:
    engine = engines("gpt_oss", rbln=FEW | {"kernels": kernels})
    for prompt in make_prompts(GPT_LENGTHS, seed=40):
        outputs = engine.generate([prompt], GPT_GREEDY)
        assert_equals_reference(engine, [prompt], outputs, GPT_TOKENS)


@pytest.mark.parametrize("kernels", ["native", "aten"])
def test_all_prompts_in_one_batch(engines: Engines, kernels: str) -> None:
    engine = engines("gpt_oss", rbln=FEW | {"kernels": kernels})
    prompts = make_prompts(GPT_LENGTHS, seed=41)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GPT_GREEDY), GPT_TOKENS)


def test_a_prefix_hit_changes_no_token(engines: Engines) -> None:
    engine = engines("gpt_oss", rbln=FEW | {"kernels": "native"})
    head, *tails = make_prompts([130, 1, 30, 60], seed=42)
    engine.generate([head], greedy(1))
    prompts = [head + tail for tail in tails]
    outputs = engine.generate(prompts, GPT_GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [128, 128, 128]
    assert_equals_reference(engine, prompts, outputs, GPT_TOKENS)


def test_nan_in_padded_rows_changes_no_token(engines: Engines, tmp_path: Path) -> None:
    poisoned = poison_padding(engines.checkpoints("gpt_oss"), tmp_path / "model")
    engine = engines.fresh("gpt_oss", checkpoint=poisoned, rbln=FEW)
    # Prompts of 5 and 70 leave padded rows in their chunks, three requests one in the batch.
    prompts = make_prompts([5, 70, 130], seed=43)
    for prompt, output in zip(prompts, engine.generate(prompts, greedy(30)), strict=True):
        expected = reference_generate(engines.checkpoints("gpt_oss"), prompt, 30)
        assert tokens([output]) == [expected.token_ids]


def test_stored_programs_read_the_weights_and_sinks_of_the_model_at_hand(engines: Engines) -> None:
    engines("gpt_oss", rbln=FEW | {"kernels": "native"})
    other = engines.checkpoints("gpt_oss", seed=1)
    engine = engines.fresh("gpt_oss", checkpoint=other, rbln=FEW)
    assert engine.total("rbln_compile_cache_requests_total", result="miss") == 0
    assert engine.total("rbln_compile_cache_requests_total", result="hit") > 0
    prompts = make_prompts([20, 100], seed=44)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GPT_GREEDY), GPT_TOKENS)


def test_bfloat16_stays_close_to_the_reference(engines: Engines) -> None:
    engine = engines("gpt_oss", dtype="bfloat16", rbln=FEW)
    (prompt,) = make_prompts([100], seed=45)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    (output,) = engine.generate([prompt], params)
    expected = reference_generate(engine.checkpoint, prompt, 1).logprobs[0]
    for token_id, entry in output.outputs[0].logprobs[0].items():
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=0.5)


# ------------------------------------------------------------------------------------------ minimax
# Sums over ranks are taken in another order, and can end on the other side of a cache's rounding.
ROUNDING = 0.1


@pytest.fixture(scope="module")
def engine(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = make_minimax(tmp_path_factory.mktemp("minimax") / "fp8")
    return engines.fresh(checkpoint=path, **AS_DEPLOYED)


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [2, LAYERS])
def test_stages_answer_as_one_rank(engine: Engine, stages: int) -> None:
    options = AS_DEPLOYED | {"pipeline_parallel_size": stages}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, 0.0)


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_stages_with_eagle3(engine: Engine, tmp_path: Path) -> None:
    """Hidden states of the first layers pass two stages to the draft model in the last one."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, params)]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    plain = engine.checkpoint / "plain"
    own = fitted_eagle3(tmp_path / "own", plain, texts, last=34, cache_scales=CACHE_SCALES)
    (run_dir := tmp_path / "run").mkdir()
    options = AS_DEPLOYED | {
        "pipeline_parallel_size": LAYERS,
        "speculative_config": speculation_of("eagle3", own),
        "additional_config": {"rbln": {"num_threads": 1, "run_dir": str(run_dir)}},
    }
    drafted = run_ranks(
        engine.checkpoint, graph_cache(), PROMPTS, checks_all_drafts=True, **options
    )
    assert_as_one_rank(engine, PROMPTS, drafted, 0.0)
    counts = Engine(None, run_dir, engine.checkpoint)
    checked = counts.total("rbln_draft_tokens_total")
    assert counts.total("rbln_draft_accepted_tokens_total") > 0.3 * checked > 0


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_two_ranks_answer_as_one(engine: Engine) -> None:
    options = AS_DEPLOYED | {"tensor_parallel_size": 2}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, ROUNDING)


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_four_engines_that_share_experts_answer_as_one(engine: Engine) -> None:
    options = AS_DEPLOYED | {"enable_expert_parallel": True, "data_parallel_size": 4}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, ROUNDING)


# ------------------------------------------------------------------------------------------ smollm2
# Needs a package index, of which it takes 93 MB once.
SMOLLM2_TOKENS = 48
SMOLLM2_GREEDY = SamplingParams(temperature=0.0, max_tokens=SMOLLM2_TOKENS)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child in two sentences.",
    "What is 12 + 30? Answer with a number.",
    "List three fruits that are red.",
    "Write a Python function that reverses a string.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "What does HTTP stand for?",
    "Return JSON with the keys name and age for a person called Ana, 31.",
    "Tell me a joke about computers.",
    "How many days has a leap year?",
    "Rewrite politely: Give me the report now!",
    "What is the difference between a list and a tuple in Python?",
    "Name the planets of the solar system in order.",
    "Continue the story: Once upon a time, in a village by the river,",
    "Is 97 a prime number? Explain.",
    "naïve café, 中文, 🙂: which languages are these?",
)


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_twenty_prompts_equal_transformers(engines: Engines) -> None:
    folder = fetch("smollm2", Path.home() / ".cache" / "rbln-serve" / "fetched")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    references = [
        reference_generate(folder, prompt, SMOLLM2_TOKENS, ignore_eos=False) for prompt in prompts
    ]
    sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    engine = engines.fresh(checkpoint=folder, dtype="float32", **sizes)
    outputs = engine.generate(prompts, SMOLLM2_GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        reference.token_ids for reference in references
    ]
    answers = [output.outputs[0].text for output in outputs]
    assert "Paris" in answers[0]
    assert "Shakespeare" in answers[7]
