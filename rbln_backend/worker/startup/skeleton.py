"""A model without its weights: real layers whose parameters are on the meta device.

Layers raise for unsupported models when they are constructed. A skeleton therefore finds out in
less than a second and a few megabytes if a model can run, before any weight is read.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rbln_backend.errors import RblnError
from rbln_backend.kv_cache.fp8 import FP8_DTYPES
from rbln_backend.kv_cache.tensors import sharing_layers
from rbln_backend.unsupported import QUANTIZATION
from rbln_backend.vllm_compat.surface import (
    AttentionLayerBase,
    AttentionSpec,
    KVCacheSpec,
    VllmConfig,
    initialize_model,
    set_current_vllm_config,
    set_default_torch_dtype,
)
from rbln_backend.worker.graphs.draft_embedding import has_own_embedding
from rbln_backend.worker.graphs.draft_model import add_draft_model


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
        self._has_embedding = has_own_embedding(config)
        with (
            set_current_vllm_config(self._config),
            set_default_torch_dtype(dtype),
            torch.device("cpu"),
            _ShapesForWeights(),
        ):
            self.model = self._make_model()

    def _make_model(self) -> nn.Module:
        try:
            model: nn.Module = initialize_model(vllm_config=self._config)
            add_draft_model(
                *(model, self._config),
                lambda config, own: initialize_model(vllm_config=config, model_config=own),
                self._has_embedding,
            )
        except Exception as error:
            method = self._config.model_config.quantization
            if method is None or isinstance(error, RblnError):
                raise
            # vLLM's layers select a kernel when they are constructed; their message is long.
            raise QUANTIZATION.refusal(f"quantization {method!r}") from error
        return model

    @property
    def num_parameters(self) -> int:
        """Number of stored weights: packed ones count as their container."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in the configured dtypes."""
        return weight_bytes(self.model)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of the model's dtype."""
        dtype = self._config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype.itemsize

    @property
    def generates(self) -> bool:
        """True if the model has a language-model head."""
        return hasattr(self.model, "compute_logits")

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return vLLM's spec of every attention layer with its own KV cache, by layer name."""
        with set_current_vllm_config(self._config):
            return kv_cache_specs(self._config)

    def sharing_layers(self) -> dict[str, str]:
        """Return the layers that read the cache of another, by name, and the name of its owner."""
        return sharing_layers(attention_layers(self._config))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters of ``model``."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def attention_layers(config: VllmConfig) -> dict[str, Any]:
    """Return every attention layer that was constructed under ``config``, by its name."""
    layers = config.compilation_config.static_forward_context
    return {n: layer for n, layer in layers.items() if isinstance(layer, AttentionLayerBase)}


def kv_cache_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return vLLM's spec of every attention layer with its own KV cache, by layer name."""
    layers = attention_layers(config)
    sharing = sharing_layers(layers)
    found = {n: _stored_spec(x, config) for n, x in layers.items() if n not in sharing}
    return {name: spec for name, spec in found.items() if spec is not None}


def _stored_spec(layer: Any, config: VllmConfig) -> KVCacheSpec | None:
    """Return vLLM's spec of ``layer`` with its cache's dtype, where vLLM has uint8 for any fp8."""
    spec: AttentionSpec | None = layer.get_kv_cache_spec(config)
    stored = FP8_DTYPES.get(getattr(layer, "kv_cache_dtype", ""))
    return spec if spec is None or stored is None else replace(spec, dtype=stored)


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
