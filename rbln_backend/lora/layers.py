"""Layers that adapters change, with the slots that hold their part of each adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.punica_wrapper import PunicaWrapperBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rbln_backend.lora.adapter_files import Target
from rbln_backend.lora.slots import LayerImage, SlotStack


class RblnPunicaWrapper(PunicaWrapperBase):
    """Made by vLLM, see ``Platform.get_punica_wrapper``."""

    rows: Tensor
    """The adapters of rows, see ``RowInput``: an input of the graph that is being captured."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **_: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)

    def add_lora_linear(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("linear layers add their share by themselves")

    def add_shrink(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("fully sharded adapters are refused")

    def add_expand(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("fully sharded adapters are refused")

    def add_lora_embedding(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("embeddings are not adapted")

    def add_lora_logits(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("the LM head adds its share as a linear layer does")


class Adapted(Protocol):
    """One layer with the slots of all adapters."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that graphs read, by name in the layer; shapes as in ``SlotStack``."""

    def image(self, adapter: LoRAModel) -> Any:
        """Return this rank's part of an adapter for ``write``; None if it has none.

        Calls no kernel, so that another thread may do it while graphs run. Raises ``AdapterError``
        for a part that does not fit together.
        """

    def write(self, slot: int, image: Any) -> None:
        """Put an image, or nothing for None, into ``slot``."""


class OfOneStack:
    """A layer whose slots are one ``SlotStack``."""

    stack: SlotStack

    def tensors(self) -> Mapping[str, Tensor]:
        return self.stack.tensors()

    def write(self, slot: int, image: LayerImage | None) -> None:
        self.stack.write(slot, image)


class AdaptedLinear(OfOneStack):
    """A linear layer that vLLM has wrapped, which reads its slots from here on.

    Adapters are split as their layers: B by outputs where the layer's outputs are, A by inputs
    where its inputs are. Replicated key heads are in the part of each rank that has them.
    """

    def __init__(
        self,
        name: str,
        layer: BaseLinearLayerWithLoRA,
        source: RblnPunicaWrapper,
        allocate: Callable[..., SlotStack],
    ) -> None:
        """``source`` has the input of the graph that is being captured.

        ``allocate`` makes a stack of ``inputs`` and ``outputs``.
        """
        self._name, self._layer, self._source = name, layer, source
        outputs = tuple(stacked.shape[2] for stacked in layer.lora_b_stacked)
        self.stack = allocate(inputs=layer.lora_a_stacked[0].shape[3], outputs=outputs)
        layer.lora_a_stacked, layer.lora_b_stacked = (self.stack.a,), self.stack.b
        layer.output_slices = outputs
        # vLLM's makes rows of [B, L, H], whose axes an NPU wants.
        layer._apply_lora_to_output = self._add  # type: ignore[method-assign]

    def _add(self, x: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` [..., outputs] of x [..., inputs] with what adapters make of x."""
        return self.stack.add(output, x, self._source.rows)

    def whole(self) -> tuple[int, tuple[int, ...]]:
        """Return the layer's inputs, and its outputs by slice, over all tensor-parallel ranks."""
        layer: LinearBase = self._layer.base_layer
        outputs: tuple[int, ...] = (layer.output_size,)
        if isinstance(layer, QKVParallelLinear):
            # Its own list counts a key head once for every rank that has it.
            keys = layer.total_num_kv_heads
            queries = layer.total_num_heads * layer.head_size
            outputs = (queries, keys * layer.head_size, keys * layer.v_head_size)
        elif isinstance(layer, MergedColumnParallelLinear):
            outputs = tuple(layer.output_sizes)
        return layer.input_size, outputs if self._layer.n_slices > 1 else (sum(outputs),)

    def image(self, adapter: LoRAModel) -> LayerImage | None:
        weights = adapter.get_lora(self._name)
        if weights is None:
            return None
        a: Any = weights.lora_a
        b: Any = weights.lora_b
        layer = self._layer
        if isinstance(a, Tensor):
            # One pair for all slices of the outputs.
            _, outputs = self.whole()
            a, b = [a] * len(outputs), list(b.split(list(outputs)))
        if layer.n_slices > 1:
            return self.stack.image(layer.slice_lora_a(a), layer.slice_lora_b(b))
        return self.stack.image([layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])])


_NAME = "lm_head"


class RblnLogitsProcessor(LogitsProcessor):
    """vLLM's, whose head adapters may change."""

    adapters: AdaptedHead | None = None

    def _apply_head(
        self, lm_head: VocabParallelEmbedding, hidden_states: Tensor, embedding_bias: Tensor | None
    ) -> Tensor:
        logits = super()._apply_head(lm_head, hidden_states, embedding_bias)
        if self.adapters is not None:
            return self.adapters.add(logits, hidden_states)
        return logits


class AdaptedHead(OfOneStack):
    """The head of ``processor``; see ``Adapted``."""

    def __init__(
        self,
        name: str,
        head: VocabParallelEmbedding,
        source: RblnPunicaWrapper,
        allocate: Callable[..., SlotStack],
    ) -> None:
        """The arguments are those of ``AdaptedLinear``."""
        self._name, self._head, self._source = name, head, source
        outputs = (head.num_embeddings_per_partition,)
        self.stack = allocate(inputs=head.embedding_dim, outputs=outputs)

    def targets(self) -> dict[str, Target]:
        return {self._name: Target.linear(self._head.embedding_dim, self._head.org_vocab_size)}

    def image(self, adapter: LoRAModel) -> LayerImage | None:
        """Return its part; tokens that fill up a rank's share get nothing."""
        weights = adapter.get_lora(self._name)
        if weights is None:
            return None
        mine = self._head.shard_indices
        upper = weights.lora_b[mine.org_vocab_start_index : mine.org_vocab_end_index]
        missing = self._head.num_embeddings_per_partition - len(upper)
        return self.stack.image([weights.lora_a], [nn.functional.pad(upper, (0, 0, 0, missing))])

    def add(self, logits: Tensor, hidden_states: Tensor) -> Tensor:
        """Return logits [rows, share of the vocabulary] with what adapters make of [rows, H]."""
        return self.stack.add(logits, hidden_states, self._source.rows)


def lm_heads(model: nn.Module) -> Iterator[tuple[str, LogitsProcessor, VocabParallelEmbedding]]:
    """The heads of ``model`` that adapters may change, by name, with what applies them.

    Of a model that names no head but its embedding, and of a head that computes in another dtype
    than the model, there are none.
    """
    for path, processor in model.named_modules():
        if not isinstance(processor, LogitsProcessor):
            continue
        parent = path.rpartition(".")[0]
        head: Any = getattr(model.get_submodule(parent), _NAME, None)
        is_plain = processor.head_dtype in (None, getattr(head, "params_dtype", None))
        if isinstance(head, VocabParallelEmbedding) and is_plain:
            yield f"{parent}.{_NAME}" if parent else _NAME, processor, head


def install_logits_processor() -> None:
    """Register the class with vLLM; idempotent, once per process, before a model is made."""
    if RblnLogitsProcessor.__dict__.get("name") is None:
        LogitsProcessor.register_oot(name=LogitsProcessor.__name__)(RblnLogitsProcessor)


def adaptable_modules(model: nn.Module) -> list[str]:
    """Return the names of the linear layers of attention and MLPs, without routers."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        siblings = model.get_submodule(name.rpartition(".")[0]).children()
        beside_experts = any(isinstance(sibling, MoERunner) for sibling in siblings)
        if not (beside_experts and isinstance(module, ReplicatedLinear)):
            found.append(name)
    return found
