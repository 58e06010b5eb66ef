"""The runs by which the vendor's wheels judge the double, and one of them carried out."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import FITTED
from tests.e4m3_inputs import answers_over_e4m3_inputs
from tests.e5m2_cache import answers_over_e5m2_cache
from tests.mtp_checkpoints import MtpMaker
from tests.npu.engines import SCRIPT
from tests.npu.test_engines import YARN_OVER_LONG
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.reference import reference_generate
from tests.sdk_double.launch import read_log
from tests.vendor.environment import vendor_environment, vendor_python

# As the fixture ``checkpoints`` has it, for ``python -m tests.vendor.call_form``.
CHECKPOINTS = Path.home() / ".cache" / "rbln-serve" / "test-checkpoints"
NUM_TOKENS = 12
CHUNK, BLOCK = 128, 1024

# What a user of a CR13 would give; few blocks, because a KV cache of 64 GiB is no use here.
OPTIONS: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2 * BLOCK,
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 16,
    "seed": 0,
}
# Their sizer of a dynamic KV cache waits for memory statistics, which the double has none of.
_FIXED_KV = {"additional_config": {"use_dynamic_kv_cache": False}}


@dataclass(frozen=True)
class Run:
    """A model, and how an engine of it is started; ``double`` are settings of the double."""

    family: str = "llama"
    fields: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    double: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    device_tensors: bool = False
    cache_scales: tuple[tuple[float, float], ...] = ()
    """Of keys and values by layer, in a cache of 8-bit floats; none in another."""
    lengths: tuple[int, ...] = ()
    """Of the first prompts; empty: see ``rounds``."""
    input_group: int = 0
    """Inputs of experts that share a scale in e4m3; 0: they are not rounded."""
    recipe: Recipe | None = None
    """How the weights are quantised; None: they are float32."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``SamplingParams``; empty: greedy."""
    drafts_by: str | None = None
    """The method of a draft model, which is fitted to the answers; None: there is none."""

    def checkpoint(self, make: CheckpointCache) -> Path:
        """A tiny member of the family that takes prompts of two blocks."""
        if self.drafts_by == "mtp":
            return self.mtp_maker(make).served
        fields = {"max_position_embeddings": 2 * BLOCK} | dict(self.fields)
        if self.recipe is None:
            return make(self.family, **fields)
        text = repr((self.family, self.recipe, sorted(fields.items())))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        place = make(self.family, **fields).parent / f"{self.family}-quantized-{digest}"
        if not place.exists():
            building = Path(tempfile.mkdtemp(prefix="building-", dir=place.parent))
            make_quantized_checkpoint(self.family, building, self.recipe, **fields)
            try:
                building.rename(place)
            except OSError:
                shutil.rmtree(building)
        return place

    def mtp_maker(self, make: CheckpointCache) -> MtpMaker:
        return MtpMaker(self.family, make, max_position_embeddings=2 * BLOCK, **self.fields)

    def reference(self, checkpoint: Path) -> Path:
        """The float32 checkpoint of the same values, which transformers reads."""
        return checkpoint if self.recipe is None else checkpoint / "plain"

    def rounds(self) -> list[list[list[int]]]:
        """Three prompts, the last of two blocks where there are two; then one that begins as the
        first does for more than a chunk.
        """
        rng = random.Random(7)
        one_block = self.options.get("max_model_len") == BLOCK
        lengths = self.lengths or (300, 90, 40 if one_block else BLOCK + 76)
        first, *others = ([rng.randrange(10, 500) for _ in range(n)] for n in lengths)
        again = first[: CHUNK + 72] + [rng.randrange(10, 500) for _ in range(30)]
        return [[first, *others], [again]]


_WINDOW = {"sliding_window": 64}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
# The sizes that their ops take.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_FP8 = Recipe(format="fp8", block=(32, 64))
# vLLM's names of formats that it calls otherwise.
_METHODS = {
    "mxfp4": "gpt_oss_mxfp4",
    "modelopt-mixed": "modelopt_mixed",
    "nvfp4": "modelopt_mixed",
}
HOST = Run()
DEVICE = Run(device_tensors=True, options=_FIXED_KV)
WITHOUT_NPU = replace(
    HOST,
    double={"npu": ""},
    environment={"VLLM_RBLN_COMPILE_ONLY": "1", "RBLN_FORCE_NPU_NAME": "RBLN-CR13"},
)
RUNS: Mapping[str, Run] = {
    "llama host": HOST,
    "llama device": DEVICE,
    # Drawn by ``top_k_top_p``, of one token: the answer is the greedy one.
    "sampled": replace(DEVICE, sampling={"temperature": 1.0, "top_k": 1}),
    "one block": replace(HOST, options={"max_model_len": BLOCK}),
    "window": replace(HOST, family="mistral", fields=_WINDOW),
    "window device": replace(DEVICE, family="mistral", fields=_WINDOW),
    # Not a CR13: the op that shifts one block.
    "window shift": replace(HOST, family="mistral", fields=_WINDOW, double={"npu": "RBLN-CR03"}),
    "experts": replace(HOST, family="qwen3_moe"),
    "fp8 cache": replace(HOST, options={"kv_cache_dtype": "fp8"}, cache_scales=((1.0, 1.0),) * 3),
    "e5m2 cache": replace(
        HOST, options={"kv_cache_dtype": "fp8_e5m2"}, cache_scales=((1.0, 1.0),) * 3
    ),
    "fp8 blocks": replace(HOST, recipe=_FP8),
    # Their graph scales the inputs of linear layers, and does not round them.
    "fp8 blocks w8a8": replace(HOST, recipe=_FP8, environment={"VLLM_RBLN_USE_W8A8": "1"}),
    "fp8 experts": replace(
        HOST,
        family="qwen3_moe",
        fields={"moe_intermediate_size": 128},
        recipe=replace(_FP8, skipped=("mlp.gate",)),
    ),
    "fp8 experts w8a8": replace(
        HOST,
        family="qwen3_moe",
        fields={"moe_intermediate_size": 128},
        recipe=replace(_FP8, skipped=("mlp.gate",)),
        environment={"VLLM_RBLN_USE_W8A8": "1"},
        input_group=_FP8.block[1],
    ),
    # Of ModelOpt's checkpoints theirs takes those of mixed precision alone.
    "modelopt fp8": replace(
        HOST, recipe=Recipe(format="modelopt-mixed", block=(0, 0), static=True)
    ),
    "nvfp4 experts": replace(
        HOST,
        family="qwen3_moe",
        fields={"moe_intermediate_size": 128},
        recipe=Recipe(format="nvfp4", group_size=16, skipped=("self_attn", "mlp.gate")),
    ),
    "latent": replace(HOST, family="deepseek_v3", fields=LATENT),
    # As gpt-oss is published.
    "mxfp4 experts": replace(
        HOST,
        family="gpt_oss",
        fields={"intermediate_size": 64, "rope_parameters": YARN_OVER_LONG},
        recipe=Recipe(format="mxfp4"),
    ),
    # Answers that cross into the second block, and that end with the context.
    "drafts": replace(
        HOST,
        options={"speculative_config": NGRAM},
        lengths=(300, BLOCK - 5, 2 * BLOCK - NUM_TOKENS),
    ),
    "medusa": replace(HOST, drafts_by="medusa", lengths=(300, 90, BLOCK - 5)),
    "eagle": replace(HOST, drafts_by="eagle", lengths=(300, 90, BLOCK - 5)),
    "eagle3": replace(HOST, drafts_by="eagle3", lengths=(300, 90, BLOCK - 5)),
    # GLM-4.5 and ERNIE 4.5, which we draft for as well, theirs does not start: see README.md.
    "mtp latent": replace(
        HOST,
        family="deepseek_v3",
        fields=LATENT,
        drafts_by="mtp",
        lengths=(300, 90, BLOCK - 5),
    ),
    "mtp mimo": replace(HOST, family="mimo", drafts_by="mtp", lengths=(300, 90, BLOCK - 5)),
    "two ranks": replace(HOST, options={"tensor_parallel_size": 2}),
    "compile only": WITHOUT_NPU,
    # As many blocks as their estimate of a CR13 says fit; of small heads that would be too many.
    "whole device": replace(
        HOST, fields={"head_dim": 128}, options={"num_gpu_blocks_override": None}
    ),
}


def expected_of(run: Run, checkpoint: Path) -> list[list[list[int]]]:
    reference = run.reference(checkpoint)
    if run.options.get("kv_cache_dtype") == "fp8_e5m2":
        return [
            answers_over_e5m2_cache(reference, batch, NUM_TOKENS, run.cache_scales)
            for batch in run.rounds()
        ]
    if run.input_group:
        return [
            answers_over_e4m3_inputs(reference, batch, NUM_TOKENS, run.input_group)
            for batch in run.rounds()
        ]
    return [
        [
            reference_generate(
                reference, prompt, NUM_TOKENS, cache_scales=run.cache_scales
            ).token_ids
            for prompt in batch
        ]
        for batch in run.rounds()
    ]


def served_by(run: Run, checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint and the options of the engine, with the run's draft model if it has one."""
    options = dict(OPTIONS) | dict(run.options)
    if run.drafts_by is None:
        return checkpoint, options
    own = checkpoint.parent / f"{checkpoint.name}-{run.drafts_by}"
    texts = [
        prompt + answer
        for prompts, answers in zip(run.rounds(), expected_of(run, checkpoint), strict=True)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    speculation = {"method": run.drafts_by, "num_speculative_tokens": 3}
    if run.drafts_by == "mtp":
        maker = run.mtp_maker(CheckpointCache(CHECKPOINTS))
        checkpoint = maker.fitted(own, texts, last=NUM_TOKENS + 1)
    else:
        FITTED[run.drafts_by](own, checkpoint, texts, last=NUM_TOKENS + 1)
        speculation["model"] = str(own)
    return checkpoint, options | {"speculative_config": speculation}


@dataclass(frozen=True)
class Answered:
    """What a run answered, round by round, and what it asked the SDK."""

    run: Run
    checkpoint: Path
    tokens: list[list[list[int]]]
    log_path: Path
    drafted: int = 0
    accepted: int = 0

    def expected(self) -> list[list[list[int]]]:
        """The same rounds by transformers."""
        return expected_of(self.run, self.checkpoint)

    @property
    def log(self) -> list[dict[str, Any]]:
        return read_log(self.log_path)

    def calls(self, call: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["call"] == call]


def run_vendor(run: Run, folder: Path, *, broken: str = "", cache: Path | None = None) -> Answered:
    """Serve the run's rounds with the vendor's wheels; ``folder`` is for this run alone.

    ``cache`` is their cache root, for a second start over what a first one left.
    """
    settings = dict(run.double) | ({"break": broken} if broken else {})
    log = folder / "sdk.jsonl"
    environment = vendor_environment(
        log, device_tensors=run.device_tensors, cache=cache or folder / "cache", **settings
    )
    several = run.options.get("tensor_parallel_size", 1) > 1
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(several))
    checkpoint = run.checkpoint(CheckpointCache(CHECKPOINTS))
    served, options = served_by(run, checkpoint)
    job = {
        "path": str(served),
        "options": options,
        "batches": run.rounds(),
        "max_tokens": NUM_TOKENS,
        "abort_after": None,
        "sampling": dict(run.sampling),
    }
    if run.recipe is not None:
        job["float32_method"] = _METHODS.get(run.recipe.format, run.recipe.format)
    if "speculative_config" in run.options:
        expected = zip(run.rounds(), expected_of(run, checkpoint), strict=True)
        job["texts"] = [
            prompt + answer
            for prompts, answers in expected
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    done = subprocess.run(
        [str(vendor_python()), str(SCRIPT), json.dumps([job])],
        env=environment | dict(run.environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    results = _printed(done.stdout, "RESULT")
    assert results, f"status {done.returncode}: {done.stderr[-4000:]}"
    (tokens,) = results[-1]
    drafted, accepted = _printed(done.stdout, "DRAFTS")[-1]
    return Answered(run, checkpoint, tokens, log, drafted, accepted)


def _printed(text: str, word: str) -> list[Any]:
    return [json.loads(x.removeprefix(word)) for x in text.splitlines() if x.startswith(word)]
