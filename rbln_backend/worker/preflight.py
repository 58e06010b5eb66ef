"""The check of a model before its weights are read, and the properties of its engine."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from rbln_backend.buckets import BucketTable, VerifyTable
from rbln_backend.collectives import init_process_groups
from rbln_backend.config import RblnConfig
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.devices.layers import install_layers
from rbln_backend.devices.port import Capabilities, device_capabilities
from rbln_backend.devices.rebel.limits import check_windows
from rbln_backend.errors import RblnError, UnsupportedModelError
from rbln_backend.host.resources import host_memory
from rbln_backend.kv_cache.fp8 import FP8_DTYPES
from rbln_backend.kv_cache.plan import KvLimits, get_reuse_unit, plan_specs
from rbln_backend.kv_cache.specs import LayerSpec, WindowSpec, window_in
from rbln_backend.kv_cache.tensors import sharing_layers
from rbln_backend.kv_transfer.options import check_cached_layers, names_nixl
from rbln_backend.layers.moe import install_expert_layers
from rbln_backend.layers.schemes import summary
from rbln_backend.limits import KV_TIERS, LORA_MODEL, QUANTIZATION
from rbln_backend.models.token_axes import refuse_rows
from rbln_backend.reports.info import CacheGroup
from rbln_backend.settings import compiled_sizes, configured
from rbln_backend.worker.device_sampler import sampler_specs
from rbln_backend.worker.draft_model import add_draft_model, has_own_embedding
from rbln_backend.worker.graph_set import get_tables, plan
from rbln_backend.worker.pooling import HostPooler
from rbln_backend.worker.weights import missing_in_files

LayerSpecs = Mapping[str, LayerSpec]


@dataclass(frozen=True)
class Preflight:
    """The properties of a model's engine, derived from the model's layers."""

    config: VllmConfig
    rbln: RblnConfig
    capabilities: Capabilities
    tables: Mapping[Phase, BucketTable]
    verify: VerifyTable
    graphs: list[GraphSpec]
    """Those that a start loads or compiles."""
    skeleton: Skeleton
    specs: LayerSpecs
    lacking: str | None
    """What the weight files lack, None if nothing is known to be missing."""


def prepare(config: VllmConfig) -> Preflight:
    """Make the model's layers in a process that runs no engine, with vLLM's process groups.

    Numbers are those of the whole model, however many ranks will share it. Raises
    ``UnsupportedModelError`` or ``ConfigError`` with the reason why it cannot run,
    and whatever vLLM's layers raise themselves.
    """
    rbln = configured(config)
    capabilities = device_capabilities(rbln)
    if capabilities.runs_on_host:
        # Their constructors raise for models that they cannot compute.
        install_layers()
    register_quantization(config)
    install_expert_layers()
    install_latent_layers(config)
    # The same engine with one rank: process groups would wait for others.
    whole = copy.copy(config)
    whole.parallel_config = parallel = copy.copy(config.parallel_config)
    parallel.tensor_parallel_size = parallel.pipeline_parallel_size = 1
    parallel.data_parallel_size = parallel.world_size = 1
    parallel.data_parallel_rank = 0
    with _process_groups(whole):
        skeleton = Skeleton(whole)
        specs = check_layers(skeleton, whole, rbln)
        with set_current_vllm_config(whole):
            lacking = missing_in_files(skeleton.model, whole)
    return Preflight(
        config=config,
        rbln=rbln,
        capabilities=capabilities,
        tables=bucket_tables(config),
        verify=compiled_sizes(config).verify,
        graphs=planned_graphs(config),
        skeleton=skeleton,
        specs=specs,
        lacking=lacking,
    )


@contextmanager
def _process_groups(config: VllmConfig) -> Iterator[None]:
    """Create vLLM's process groups of one rank, and destroy them after the block."""
    with tempfile.TemporaryDirectory(prefix="rbln-check-") as folder:
        try:
            with set_current_vllm_config(config):
                init_process_groups(config, 0, f"file://{folder}/store", 0)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def check_layers(skeleton: Skeleton, config: VllmConfig, rbln: RblnConfig) -> LayerSpecs:
    """Return our KV cache spec of every attention layer; raise for an unsupported model."""
    if generates(config) and not skeleton.generates:
        raise UnsupportedModelError(
            f"architecture {config.model_config.architecture!r} has no language-model head and "
            "cannot generate text; name a ...ForCausalLM architecture in config.json's "
            "'architectures'"
        )
    if config.lora_config is not None:
        # Imported here because vLLM's part takes long.
        from vllm.model_executor.models import supports_lora

        # Latent attention splits a projection: adapters of that one would have no effect.
        if not supports_lora(skeleton.model) or config.model_config.use_mla:
            raise LORA_MODEL.refusal(config.model_config.architecture)
    if not generates(config):
        # Raises if a prefix hit would hide tokens from the pooler.
        HostPooler(skeleton.model, reuses_prefixes=bool(config.cache_config.enable_prefix_caching))
    if device_capabilities(rbln).keeps_axes:
        refuse_rows(skeleton.model)
    limits = kv_limits(config, rbln)
    shared = set(skeleton.sharing_layers().values())
    specs = plan_specs(skeleton.kv_cache_specs(), limits, shared)
    if device_capabilities(rbln).npu is not None:
        check_windows([window for spec in specs.values() if (window := window_in(spec))])
    if rbln.has_kv_tiers:
        windows = [window_in(spec) for spec in specs.values()]
        on_npu = device_capabilities(rbln).npu is not None
        KV_TIERS.refuse(
            {
                "layers that all have a sliding window": None not in windows,
                "a sliding window on an NPU": on_npu and any(windows),
            }
        )
    if names_nixl(config.kv_transfer_config):
        check_cached_layers(specs.values())
    if not specs and config.model_config.attn_type != "encoder_only":
        raise UnsupportedModelError(
            f"architecture {config.model_config.architecture!r} has no attention layer with a KV "
            "cache, and the RBLN backend runs no other kind of decoder"
        )
    return specs


def generates(config: VllmConfig) -> bool:
    """Return True for an engine that generates text, False for one that pools."""
    return config.model_config.runner_type == "generate"


def bucket_tables(config: VllmConfig) -> dict[Phase, BucketTable]:
    return get_tables(compiled_sizes(config))


def planned_graphs(config: VllmConfig) -> list[GraphSpec]:
    sizes, device = compiled_sizes(config), device_capabilities(configured(config))
    return plan(
        get_tables(sizes),
        sizes.verify,
        has_logits=generates(config),
        tests_slots=config.lora_config is not None and not device.runs_on_host,
        prompts=configured(config).chunk_prompts,
        drafted=sizes.drafted,
    )


def sampler_graphs(config: VllmConfig, planned: Sequence[GraphSpec]) -> list[GraphSpec]:
    """Return the graphs that draw the tokens of ``planned`` ones, which every start compiles."""
    return sampler_specs(planned) if configured(config).sample_on_device else []


def kv_limits(config: VllmConfig, rbln: RblnConfig) -> KvLimits:
    """Return the limits of the KV cache; the platform has set ``rbln.sub_block_size``."""
    assert rbln.sub_block_size is not None
    device = device_capabilities(rbln)
    reuses = config.cache_config.enable_prefix_caching and rbln.window_prefix_cache
    # An NPU's ops for windows have no total token counts, which a prefix log needs.
    reuses = reuses and device.runs_on_host
    return KvLimits(
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        chunk_tokens=config.scheduler_config.max_num_batched_tokens,
        block_size=config.cache_config.block_size,
        unit=rbln.sub_block_size,
        log_bytes=host_memory().total_bytes // 8 if reuses else 0,
        log_tokens=rbln.window_prefix_tokens,
        hybrid=not config.scheduler_config.disable_hybrid_kv_cache_manager,
        appends_windows=device.appends_windows,
        own_ops=device.general_attention and not rbln.use_custom_kernel,
        checks_drafts=config.speculative_config is not None,
    )


def cache_groups(specs: LayerSpecs) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with equal caches, in the order of their first layers."""
    counts = Counter(
        (window_in(spec), spec.num_kv_heads, spec.head_size, str(spec.dtype))
        for spec in specs.values()
    )
    return tuple(
        CacheGroup(
            num_layers=number,
            window=window,
            num_kv_heads=heads,
            head_size=size,
            dtype=dtype.removeprefix("torch."),
        )
        for (window, heads, size, dtype), number in counts.items()
    )


def prefix_caching(config: VllmConfig, rbln: RblnConfig, specs: LayerSpecs) -> tuple[bool, str]:
    """Return True if prefixes are shared, and the unit or the reason why not."""
    if not config.cache_config.enable_prefix_caching:
        flag = "--no-enable-prefix-caching"
        if generates(config):
            return False, flag
        return False, f"vLLM has no prefix hits for this way of pooling, or {flag}"
    assert rbln.sub_block_size is not None
    tokens = get_reuse_unit(specs.values(), rbln.sub_block_size)
    unit = f"prefixes are shared in units of {tokens} tokens"
    windows = [spec for spec in specs.values() if window_in(spec) is not None]
    if not windows:
        return True, unit
    if not rbln.window_prefix_cache:
        return False, "sliding-window layers need window_prefix_cache, which is off"
    if not all(isinstance(spec, WindowSpec) and spec.log_pages for spec in windows):
        return False, "sliding-window layers have no prefix log on an NPU"
    return True, f"{unit}; sliding-window layers keep a log"


# A model without its weights: real layers whose parameters are on the meta device.
#
# Layers raise for unsupported models when they are constructed. A skeleton therefore finds out in
# less than a second and a few megabytes if a model can run, before any weight is read.


class Skeleton:
    """The layers of ``config``'s model. Raises the errors of the model's layers.

    Needs vLLM's process groups. ``config`` is not changed. Tables that vLLM shares between models,
    such as rotary embeddings, have real values.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = copy.copy(config)
        self._config.compilation_config = compilation = copy.copy(config.compilation_config)
        # Layers register themselves here, under the same names as in the real model.
        compilation.static_forward_context = {}
        compilation.static_all_moe_layers = []
        compilation.enabled_custom_ops = Counter()
        compilation.disabled_custom_ops = Counter()
        dtype = config.model_config.dtype
        assert isinstance(dtype, torch.dtype), "vLLM resolves names such as 'auto'"
        # Reads files, for which the mode below leaves no memory.
        has_embedding = has_own_embedding(config)
        with (
            set_current_vllm_config(self._config),
            set_default_torch_dtype(dtype),
            torch.device("cpu"),
            _ShapesForWeights(),
        ):
            try:
                self.model: nn.Module = initialize_model(vllm_config=self._config)
                add_draft_model(
                    self.model,
                    self._config,
                    lambda config, draft_config: initialize_model(
                        vllm_config=config, model_config=draft_config
                    ),
                    has_embedding,
                )
            except Exception as error:
                method = self._config.model_config.quantization
                if method is None or isinstance(error, RblnError):
                    raise
                # vLLM's layers select a kernel when they are constructed; their message is long.
                raise QUANTIZATION.refusal(f"quantization {method!r}") from error

    @property
    def num_parameters(self) -> int:
        """Number of stored weights: packed ones count as their container."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of the model's dtype."""
        dtype = self._config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype.itemsize

    @property
    def generates(self) -> bool:
        return hasattr(self.model, "compute_logits")

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        with set_current_vllm_config(self._config):
            return kv_cache_specs(self._config)

    def sharing_layers(self) -> dict[str, str]:
        return sharing_layers(attention_layers(self._config))


def weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def attention_layers(config: VllmConfig) -> dict[str, Any]:
    """Return every attention layer that was constructed under ``config``, by its name."""
    layers = config.compilation_config.static_forward_context
    return {n: layer for n, layer in layers.items() if isinstance(layer, AttentionLayerBase)}


def kv_cache_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return vLLM's spec of every attention layer with its own KV cache, by layer name."""
    layers = attention_layers(config)
    sharing = sharing_layers(layers)
    specs: dict[str, KVCacheSpec] = {}
    for name, layer in layers.items():
        spec: AttentionSpec | None = None
        if name not in sharing:
            spec = layer.get_kv_cache_spec(config)
        if spec is None:
            continue
        # vLLM has uint8 for any fp8.
        stored = FP8_DTYPES.get(getattr(layer, "kv_cache_dtype", ""))
        specs[name] = spec if stored is None else replace(spec, dtype=stored)
    return specs


class _ShapesForWeights(TorchFunctionMode):
    """Puts tensors of ``torch.empty`` on the meta device.

    vLLM's layers allocate their weights with it. Tensors made in other ways keep their values,
    which layers may read while the model is constructed.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


# Our layers for quantised weights, latent attention and adapters, installed only where needed.
#
# They are imported here late, because what they import of vLLM takes long.


_CONFIGS = "rbln_backend.layers.quantization"


def register_quantization(config: VllmConfig) -> None:
    if config.model_config.quantization is not None:
        from rbln_backend.layers.quantization import register

        register()


def quantized_summary(model: nn.Module) -> str | None:
    """Return as text which and how many layers of ``model`` are quantised; None without any."""
    if _CONFIGS not in sys.modules:
        return None
    from rbln_backend.layers.quantization import quantized_layers

    return summary(quantized_layers(model))


def install_latent_layers(config: VllmConfig) -> None:
    if config.model_config.use_mla:
        from rbln_backend.layers.latent import install

        install()


def install_adapted_layers(config: VllmConfig) -> None:
    """Install the layers that adapters need, before the model is made."""
    if config.lora_config is not None:
        from rbln_backend.lora.layers import install_logits_processor

        install_logits_processor()
