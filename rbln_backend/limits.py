"""Unsupported features, one row each, for error messages and docs/models.md.

A message names the feature, the reason and an alternative, in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rbln_backend.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of a model or a command line; `known_from` names examples."""

    name: str
    known_from: str
    why: str
    instead: str

    def refusal(self, where: str = "") -> UnsupportedModelError:
        """Return the error; `where` names the layer or the value in question."""
        place = f"{where}: " if where else ""
        return UnsupportedModelError(
            f"{place}{self.name}: not supported by the RBLN backend, {self.why}; {self.instead}"
        )

    def refuse(self, settings: Mapping[str, bool], flag: str = "") -> None:
        """Raise for the first of ``settings`` that is present, of those with ``flag``."""
        for setting, is_present in settings.items():
            if is_present:
                raise self.refusal(f"{flag} with {setting}" if flag else setting)


MULTIMODAL = Feature(
    "multimodal inputs",
    "Gemma-3 with its vision tower, Mistral-Small-3.x, Qwen-VL, Llava, InternVL",
    "whose graphs take token ids alone",
    "serve a text-only checkpoint, or with VLLM_RBLN_DISABLE_MM=1 or --language-model-only the "
    "text of Gemma-3, Gemma-3n, Gemma-4, Llama-4, Mistral-Small-3.x, "
    "Ministral-3, Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Llava",
)
MROPE = Feature(
    "rotary embeddings of several axes (M-RoPE)",
    "the text of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, on an NPU with SDK 0.12.1 or later",
    "which that release refuses",
    "run it on the emulated device, or serve a text-only checkpoint",
)
SLEEP = Feature(
    "an engine that sleeps, or discards weights or KV caches",
    "`LLM.sleep()`, vLLM 0.31's `discard`",
    "whose weights and KV caches stay where the graphs read them",
    "end the process; its compiled graphs stay in the store",
)
ENCODER_DECODER = Feature(
    "encoder-decoder models",
    "T5, BART, Whisper",
    "which has no cross attention",
    "serve a decoder-only model",
)
STATE_SPACE = Feature(
    "state-space or linear-attention layers",
    "Mamba, Jamba, Bamba, Qwen3-Next",
    "whose caches hold keys and values alone",
    "serve a model whose layers are all attention",
)
MLA = Feature(
    "multi-head latent attention (MLA)",
    "drafts and encoders of that kind",
    "whose ops over a compressed KV cache are causal, and on an NPU take 512 compressed and 64 "
    "rotated numbers of a token",
    "run it on the emulated device, or serve a model with grouped-query attention",
)
SPARSE_ATTENTION = Feature(
    "sparse attention",
    "DeepSeek-V3.2",
    "whose ops attend to every cached token or to a sliding window",
    "serve a model with dense attention",
)
CHUNKED_ATTENTION = Feature(
    "chunked local attention of contexts above a chunk",
    "Llama-4 on an NPU or with RBLN_USE_CUSTOM_KERNEL",
    "whose ops there attend to every cached token or to a sliding window",
    "set --max-model-len to the chunk (8192) or less, or run it on the emulated device",
)
ROWS = Feature(
    "attention that splits rows of tokens itself",
    "MiniCPM3, on an NPU",
    "whose NPU takes hidden states with axes of batch and sequence",
    "run it on the emulated device",
)
DUAL_CHUNK_ATTENTION = Feature(
    "dual chunk attention",
    "Qwen2.5-1M",
    "whose ops attend to every cached token or to a sliding window",
    "remove dual_chunk_attention_config from config.json, for contexts that need none",
)
PREFIX_LM = Feature(
    "attention of a prompt's tokens to later ones (prefix LM)",
    "HRM-Text",
    "whose ops of models that generate are causal",
    "serve a causal model",
)
ALIBI = Feature(
    "ALiBi position biases",
    "BLOOM, Falcon-RW on an NPU; encoders",
    "whose SDK's attention ops and attention in both directions take no biases",
    "run it on the emulated device, or serve a model with rotary or learned positions",
)
KV_SHARING = Feature(
    "KV sharing between layers",
    "Gemma-3n, Gemma-4 E2B and E4B on an NPU or with RBLN_USE_CUSTOM_KERNEL",
    "whose ops there write the cache that they read",
    "run it on the emulated device, or serve a model whose layers do not share KV",
)
SOFT_CAP = Feature(
    "attention logit soft capping",
    "Gemma-2, on an NPU",
    "whose attention ops have no soft cap on an NPU",
    "run it on the emulated device, which has one",
)
UNEQUAL_HEADS = Feature(
    "values of another head size than keys",
    "MiMo-V2, whose layers in vLLM choose a GPU's backend; any on an NPU",
    "whose emulated device alone takes them, of layers that leave the backend to the platform",
    "serve a model with one head size",
)
EXPERT_ROUTING = Feature(
    "expert routing by token ids, to experts that do nothing, or with weights on several inputs",
    "DeepSeek-V4, LongCat-Flash",
    "whose experts are chosen by the router's scores; weights on the input need a single expert",
    "serve a model that routes like Mixtral, Qwen-MoE, GLM-4.5 or gpt-oss",
)
EXPERT_ACTIVATION = Feature(
    "experts with another activation than SiLU or the SwiGLU of gpt-oss",
    "Gemma-4 with experts, Step-3.5",
    "whose expert op knows these two",
    "serve a model such as Mixtral, Qwen-MoE or gpt-oss",
)
QUANTIZED_EXPERTS = Feature(
    "quantised experts in this form",
    "mixtures whose gate and up projections differ in their format or have no whole groups; on "
    "an NPU all but FP8 in blocks, MXFP4 and NVFP4",
    "which multiplies by whole groups, on an NPU by the three forms that the SDK has ops for",
    "serve a bfloat16 copy of the checkpoint",
)
QUANTIZATION = Feature(
    "weights in this quantised format",
    "bitsandbytes, MXFP8, NVFP4 of linear layers, of single layers too, GGUF by name, vLLM's own "
    "at load",
    "which multiplies by the formats of docs/quantization.md alone",
    "serve a checkpoint in one of these formats, or a bfloat16 copy",
)
QUANTIZATION_ON_NPU = Feature(
    "weights in this quantised format on an NPU",
    "FP8 with one scale per channel, W8A8 of integers, AWQ and other zero points",
    "whose vendor has forms for symmetric integers of 4 and 8 bits, for FP8 in blocks and for FP8 "
    "with one scale per tensor",
    "serve a GPTQ, pack-quantized, block FP8 or ModelOpt FP8 checkpoint, a bfloat16 copy, or run "
    "it on the emulated device",
)
QUANTIZED_EMBEDDING = Feature(
    "quantised input embeddings",
    "compressed-tensors checkpoints whose targets match embed_tokens",
    "which quantises linear layers and LM heads",
    "serve a checkpoint that leaves its input embeddings alone",
)
EXPERT_EXCHANGE = Feature(
    "another exchange of experts' tokens",
    "--all2all-backend other than allgather_reducescatter",
    "whose graphs gather the tokens of all data-parallel ranks",
    "drop --all2all-backend",
)
CONTEXT_PARALLEL = Feature(
    "context parallelism",
    "--prefill-context-parallel-size, --decode-context-parallel-size",
    "whose attention ops see the whole context of a request on one rank",
    "use --tensor-parallel-size",
)
HOSTS = Feature(
    "ranks on other hosts that neither Ray nor --headless starts",
    "--nnodes, --data-parallel-size-local 0, --data-parallel-hybrid-lb, -external-lb, "
    "--data-parallel-backend ray",
    "whose other hosts run --headless servers or are found by Ray",
    "use --distributed-executor-backend ray, --headless on the other hosts, or one service per "
    "host behind a load balancer",
)
EXPERTS_APART = Feature(
    "data-parallel experts on several hosts",
    "--data-parallel-size-local below --data-parallel-size with a mixture of experts",
    "whose experts' ranks exchange tokens on one host",
    "give --data-parallel-size-local no value, or use one service per host behind a load balancer",
)
OWN_LAUNCHER = Feature(
    "ranks that the user starts",
    "--distributed-executor-backend external_launcher",
    "whose HTTP process starts the engine",
    "use mp on one host, ray on several",
)
MICRO_BATCHES = Feature(
    "batches that are run in two halves",
    "--enable-dbo, --ubatch-size",
    "whose graphs take a whole batch",
    "drop the flag",
)
LORA_SHARDS = Feature(
    "LoRA adapters that are split twice",
    "--fully-sharded-loras",
    "whose ranks split an adapter as they split the layer that it changes",
    "drop --fully-sharded-loras",
)
LORA_ON_NPU = Feature(
    "LoRA adapters of this engine on an NPU",
    "--enable-lora on an NPU without torch-rbln (use_device_tensor), with "
    "VLLM_RBLN_ENABLE_WARM_UP=0 or with --lora-target-modules experts or lm_head",
    "whose slots there are tensors of linear layers in the NPU's memory, which a start tests",
    "install torch-rbln and leave the warm-up on, train the adapter on attention and MLPs, or "
    "merge it into the checkpoint",
)
LORA_UNPROVEN = Feature(
    "LoRA adapters under this SDK",
    "--enable-lora on an NPU whose graphs do not follow what is written into a slot",
    "whose start on an NPU tests that every graph computes with what lies in a slot",
    "drop --enable-lora, or merge the adapter into the checkpoint",
)
LORA_MODEL = Feature(
    "LoRA adapters of models that vLLM does not adapt",
    "--enable-lora with GPT-2, GPT-J, GPT-NeoX, Falcon, StableLM, DeepSeek-V2, V3",
    "which takes over the layers that vLLM wraps",
    "drop --enable-lora, or merge the adapter into the checkpoint",
)
LORA_TARGET = Feature(
    "LoRA adapters of embeddings",
    "--lora-target-modules embed_tokens",
    "which adapts the projections of attention and MLPs, experts and LM heads",
    "train the adapter on those",
)
LORA_EXPERTS_APART = Feature(
    "LoRA adapters of experts that data-parallel engines share",
    "--lora-target-modules experts with --data-parallel-size",
    "whose engines compute each other's rows and know their own adapters alone",
    "use --tensor-parallel-size, or train the adapter on attention",
)
LORA_EXPERT_FORMATS = Feature(
    "other files of experts' LoRA adapters",
    "--enable-moe-shared-loras, --enable-mixed-moe-lora-format",
    "which reads what PEFT writes, experts one by one or stacked",
    "drop the flag",
)
LORA_DTYPE = Feature(
    "LoRA adapters in another dtype than the model",
    "--lora-dtype",
    "whose op adds products to sums of one dtype",
    "drop --lora-dtype",
)
SPECULATION_METHOD = Feature(
    "speculative decoding with this method",
    "--speculative-config with draft_model, ngram_gpu, dflash and others",
    "whose drafts come from known texts, Medusa's heads, layers of EAGLE or an MTP layer",
    'use {"method": "ngram"}, {"method": "suffix"} or {"method": "medusa"}',
)
DRAFT_MODEL = Feature(
    "a draft model in this engine",
    "methods with a draft model with adapters or KV tiers; medusa, eagle and eagle3 with latent "
    "attention (MLA)",
    "with which it has not been shown to give the same tokens",
    'use {"method": "ngram"} or {"method": "suffix"}',
)
EAGLE_MODEL = Feature(
    "EAGLE with this model",
    "method eagle with another architecture than LlamaForCausalLM, eagle3 with others than Llama, "
    "Mistral, Qwen2, Qwen3, Qwen3-MoE, gpt-oss and MiniMax-M2, layers with another KV cache; "
    "eagle with quantised weights",
    "whose layers of EAGLE have a KV cache like the served model's, and have not been run on "
    "others",
    'use {"method": "medusa"}, {"method": "ngram"} or {"method": "suffix"}',
)
MTP_MODEL = Feature(
    "MTP with this model",
    "method mtp with other architectures than DeepSeek-V3's, ERNIE 4.5's, GLM-4.5's and MiMo's, "
    "several MTP layers, or quantised weights other than fp8 and compressed-tensors "
    "float-quantized, on an NPU other than fp8 in blocks",
    "which runs one MTP layer, of families that have been shown to give the same tokens",
    'use {"method": "ngram"} or {"method": "suffix"}',
)
DRAFT_MODEL_OPTION = Feature(
    "this option of a draft model",
    "draft_sample_method, rejection_sample_method, quantization, kv_cache_dtype, another "
    "draft_tensor_parallel_size than --tensor-parallel-size and other options of a draft model",
    "which computes drafts in the served model's dtype and checks them by the tokens that would "
    "be sampled",
    "drop the option",
)
SPECULATION_POOLING = Feature(
    "speculative decoding of a model that pools",
    "--speculative-config with --runner pooling",
    "whose graphs of such a model make no tokens",
    "drop --speculative-config",
)
SPECULATION_RANKS = Feature(
    "speculative decoding with data-parallel experts",
    "--speculative-config with data-parallel experts",
    "whose ranks agree on requests and chunks alone",
    "use --tensor-parallel-size, or drop --speculative-config",
)
SPECULATION_STAGES = Feature(
    "speculative decoding of this kind with pipeline stages",
    "--speculative-config with --pipeline-parallel-size and method mtp of ERNIE 4.5, or with Ray",
    "whose drafts come with the results of its own executor",
    "use another method there, or --tensor-parallel-size",
)
SPECULATION_KERNELS = Feature(
    "speculative decoding with RBLN_USE_CUSTOM_KERNEL",
    "--speculative-config with RBLN_USE_CUSTOM_KERNEL",
    "whose custom decode kernels are not known to write several tokens of a request",
    "drop --speculative-config, or unset RBLN_USE_CUSTOM_KERNEL",
)
SPECULATION_WINDOWS = Feature(
    "speculative decoding of sliding windows that an NPU shifts",
    "--speculative-config with Mistral, Gemma-3 or gpt-oss on an NPU other than RBLN-CR13",
    "whose shifted window loses its oldest token to a draft that is rejected afterwards",
    "drop --speculative-config, or run it on RBLN-CR13 or on the emulated device",
)
ASYNC_SCHEDULING = Feature(
    "asynchronous scheduling of this engine",
    "--async-scheduling with --pipeline-parallel-size, data-parallel experts, "
    "--speculative-config, --kv-transfer-config, KV tiers, models that pool, or on an NPU "
    "VLLM_RBLN_SAMPLER=0",
    "whose steps begin before their tokens are known to other ranks, to a drafter or to a "
    "connector, and on an NPU end where the tokens that its graph picked are read",
    "drop --async-scheduling, or what it is combined with",
)
DEVICE_SAMPLING = Feature(
    "sampling on the device",
    "sample_on_device on the emulated device, without torch-rbln, with VLLM_RBLN_SAMPLER=0, "
    "VLLM_RBLN_ENABLE_WARM_UP=0, models that pool, --tensor-parallel-size, "
    "--pipeline-parallel-size or data-parallel experts",
    "whose graphs read the model's logits where torch-rbln keeps them, and draw other tokens on "
    "each rank",
    "drop sample_on_device, or what it is combined with",
)
PREFILL_PROMPTS = Feature(
    "several prompts in one prefill step on an NPU, of a model that pools, or with "
    "RBLN_USE_CUSTOM_KERNEL",
    "prefill_prompts above 1",
    "whose documented prefill there takes one request",
    "leave prefill_prompts unset",
)
KV_DTYPE = Feature(
    "a KV cache in this dtype",
    "--kv-cache-dtype other than the model's dtype, fp8 (e4m3) and on an NPU fp8_e5m2; fp8 with "
    "RBLN_USE_CUSTOM_KERNEL, of latent attention (MLA) and of encoders, which have no cache; "
    "fp8 on an NPU with sliding windows or with blocks as long as the context",
    "whose ops read keys and values as the model computes them or, those of causal attention over "
    "blocks, as e4m3 or on an NPU e5m2",
    "drop --kv-cache-dtype, or name the model's dtype where the checkpoint asks for fp8",
)
KV_TRANSFER = Feature(
    "KV transfer between engines",
    "--kv-transfer-config with another connector than NixlConnector, OffloadingConnector or a "
    "MultiConnector of both",
    "whose KV caches belong to one engine",
    "name NixlConnector to send prompts' KV to another server, or OffloadingConnector to keep "
    "prefixes",
)
NIXL = Feature(
    "NixlConnector for this engine",
    "NixlConnector with pipeline stages, several engines, Ray, more ranks than heads of keys and "
    "values, speculation, adapters, an NPU without torch-rbln, sliding windows or models that "
    "pool",
    "which sends whole blocks of contexts from host memory",
    "drop --kv-transfer-config, or what it is combined with",
)
KV_TIERS = Feature(
    "keeping prefixes in KV tiers",
    "OffloadingConnector, --kv-offloading-size and the kv_tier settings with several ranks, on "
    "an NPU without torch-rbln, with sliding windows on an NPU or in all layers, with models that "
    "pool, or with --prefix-caching-hash-algo xxhash",
    "which copies pages of contexts to host memory, in the one process of an engine, and finds "
    "them by hashes that no two prompts share",
    "drop --kv-transfer-config, --kv-offloading-size and the kv_tier settings",
)

FEATURES = tuple(row for row in tuple(globals().values()) if isinstance(row, Feature))
"""All rows in this order, models' features first."""
