"""LM heads that adapters change: each rank adds to its share of the logits, before a gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from rbln_backend.lora.adapted import OfOneStack
from rbln_backend.lora.punica import RblnPunicaWrapper
from rbln_backend.lora.slot_stack import LayerImage, SlotStack
from rbln_backend.lora.target import Target
from rbln_backend.vllm_compat.lora import LogitsProcessor, LoRAModel, VocabParallelEmbedding

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
        self._stack = allocate(inputs=head.embedding_dim, outputs=outputs)

    def targets(self) -> dict[str, Target]:
        """Return the layer's name in adapters with its shapes."""
        return {self._name: Target.linear(self._head.embedding_dim, self._head.org_vocab_size)}

    def image(self, adapter: LoRAModel) -> LayerImage | None:
        """As ``Adapted``; tokens that fill up a rank's share get nothing."""
        weights = adapter.get_lora(self._name)
        if weights is None:
            return None
        mine = self._head.shard_indices
        upper = weights.lora_b[mine.org_vocab_start_index : mine.org_vocab_end_index]
        missing = self._head.num_embeddings_per_partition - len(upper)
        return self._stack.image([weights.lora_a], [nn.functional.pad(upper, (0, 0, 0, missing))])

    def add(self, logits: Tensor, hidden_states: Tensor) -> Tensor:
        """Return logits [rows, share of the vocabulary] with what adapters make of [rows, H]."""
        return self._stack.add(logits, hidden_states, self._source.rows)


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
