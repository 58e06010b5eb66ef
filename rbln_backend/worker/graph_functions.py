"""The functions that are captured, one per phase: embedding to LM head, or to hidden states.

With pipeline stages, each rank captures its own part of the model: the outputs of one stage are
inputs of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.sequence import IntermediateTensors

from rbln_backend.core import Phase
from rbln_backend.devices.port import Capabilities
from rbln_backend.graphs.operators import check_ops
from rbln_backend.models import missing_in
from rbln_backend.settings import compiled_sizes, configured
from rbln_backend.speculation.text_drafts import get_draft_model
from rbln_backend.worker.draft_model import carried_states, draft_function, in_rows, read_hidden

GraphFunction = Callable[..., Any]
_Forward = Callable[..., Any]

INTERMEDIATE = "intermediate."
"""Prefix of the names of the inputs that come from the previous stage."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part of the model in one pipeline stage."""

    is_first: bool = True
    is_last: bool = True
    intermediates: tuple[str, ...] = ()
    """Names of the graph's inputs from the previous stage, in order; none in the first stage."""
    passed: tuple[str, ...] = ()
    """Names of other tensors of the previous stage, which the next one gets as they are."""
    sent: tuple[str, ...] = ()
    """Names of the graph's outputs for the next stage, in order; none in the last stage."""
    picks_tokens: bool = False
    """The last output is int32 [rows]: the token of the largest logit, by the SDK's ``argmax``."""
    keeps_hidden: bool = False
    """Decode and verify graphs return what a draft model reads after the logits: hidden states
    [rows, H], or those of several layers, combined."""
    has_sdk_argmax: bool = False
    """A draft model's graphs end in the SDK's ``argmax``, else in the emulator's kernel."""
    keeps_axes: bool = False
    """Layers take [B, L, H], else rows [B * L, H]; see ``text_models.token_axes``."""

    @property
    def received(self) -> tuple[str, ...]:
        """The graph inputs that come from the previous stage."""
        return tuple(INTERMEDIATE + name for name in self.intermediates)


WHOLE = ModelPart()


def whole_part(capabilities: Capabilities, config: VllmConfig) -> ModelPart:
    """Return the part of a sole stage; raises where the installed SDK lacks ``argmax``."""
    has_model = compiled_sizes(config).drafted is not None
    picks = config.model_config.runner_type == "generate" and configured(config).sampler
    if capabilities.picks_tokens and (picks or has_model):
        check_ops("argmax")
    return ModelPart(
        picks_tokens=picks and capabilities.picks_tokens,
        keeps_hidden=get_draft_model(config) is not None,
        has_sdk_argmax=capabilities.picks_tokens,
        keeps_axes=capabilities.keeps_axes,
    )


def graph_function(
    phase: Phase, model: Any, part: ModelPart = WHOLE
) -> tuple[GraphFunction, tuple[str, ...]]:
    """Return the function of ``phase`` over ``model``, and the names of its inputs in order."""
    if phase is Phase.LOGITS:

        def logits(hidden: Tensor) -> tuple[Tensor]:
            """[rows, H] -> logits [rows, V]."""
            return (_get_logits(model, hidden),)

        return logits, ("hidden",)
    if phase is Phase.ADAPTERS:

        def product(hidden: Tensor) -> tuple[Tensor]:
            """[rows, 1, H] -> what the adapters of the first layer make of it."""
            return (model.lora_manager.first_product(hidden),)

        return product, ("hidden",)
    if phase in (Phase.DRAFT, Phase.DRAFT_PREFILL):
        return draft_function(model, by_sdk=part.has_sdk_argmax, keeps_axes=part.keeps_axes)
    forward, names = _forward(model, part), ("input_ids", "positions", *part.received)
    if not part.is_last:
        return _stage(forward, part.sent), names
    if phase is Phase.POOLING:

        def pooling(*inputs: Tensor) -> tuple[Tensor]:
            """[1, L], [1, L] -> hidden states [L, H]; the pooler runs on the host."""
            return (forward(*inputs),)

        return pooling, names
    if phase is Phase.PREFILL:
        return _prefill(model, forward, part), ("token_indices", *names)
    return _decode(model, forward, part), names


def _prefill(model: Any, forward: _Forward, part: ModelPart) -> GraphFunction:
    def prefill(token_indices: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """[R], then [1, L], [1, L] -> logits [R, V] of the last rows, hidden states [L, H]."""
        hidden, combined = read_hidden(model, forward(*inputs))
        if part.keeps_axes:
            logits = _logits_of_axes(model, hidden.unsqueeze(0)[:, token_indices])
        else:
            logits = _get_logits(model, hidden.index_select(0, token_indices))
        return (logits, hidden, *combined, *_picked(logits, part))

    return prefill


def _decode(model: Any, forward: _Forward, part: ModelPart) -> GraphFunction:
    def decode(*inputs: Tensor) -> tuple[Tensor, ...]:
        """[B, L], [B, L] -> logits [B * L, V]; L is 1 where no drafts are checked."""
        hidden, combined = read_hidden(model, forward(*inputs))
        if part.keeps_axes:
            logits = _logits_of_axes(model, hidden.view(*inputs[0].shape, -1))
        else:
            logits = _get_logits(model, hidden)
        kept = (combined or (hidden,)) if part.keeps_hidden else ()
        return (logits, *kept, *_picked(logits, part))

    return decode


def forbid_missing_tokens(model: nn.Module, config: ModelConfig, *, runs_on_host: bool) -> None:
    """Give ``model`` what its graphs need to forbid ids without a token, if there are any.

    On the host these logits alone are written; a device adds a mask [V] of 0 and -inf.
    """
    missing = missing_in(config)
    if not missing:
        return
    # [1, len(missing)]
    values = torch.full((1, len(missing)), -torch.inf, dtype=config.head_dtype)
    ids = torch.tensor(missing)
    if not runs_on_host:
        mask = torch.zeros(1, config.get_vocab_size(), dtype=config.head_dtype)
        values = mask.index_copy_(1, ids, values)
    else:
        model.register_buffer("missing_ids", ids, persistent=False)
    model.register_buffer("missing_logits", values, persistent=False)


def _get_logits(model: Any, hidden: Tensor) -> Tensor:
    """Hidden states [rows, H] to logits [rows, V], -inf for ids without a token."""
    logits: Tensor = model.compute_logits(hidden)
    values: Tensor | None = getattr(model, "missing_logits", None)
    if values is None:
        return logits
    ids: Tensor | None = getattr(model, "missing_ids", None)
    if ids is None:
        return logits + values
    return logits.index_copy_(1, ids, values.expand(logits.shape[0], -1))


def _logits_of_axes(model: Any, hidden: Tensor) -> Tensor:
    """As ``_get_logits``, of hidden states [B, L, H], as the vendor's graphs compute them."""
    return _get_logits(model, hidden).flatten(0, 1)


def _picked(logits: Tensor, part: ModelPart) -> tuple[Tensor, ...]:
    """Logits [rows, V] to tokens int32 [rows], if the graph picks them."""
    return (torch.ops.rbln.argmax(logits),) if part.picks_tokens else ()


def _stage(forward: _Forward, sent: tuple[str, ...]) -> GraphFunction:
    def stage(*inputs: Tensor) -> tuple[Tensor, ...]:
        """[B, L], [B, L], received tensors [B * L, H] -> tensors [B * L, H] of the next stage."""
        result = forward(*inputs)
        return tuple(result[name] for name in sent)

    return stage


def _forward(model: Any, part: ModelPart) -> _Forward:
    states, carried = getattr(model, "layer_states", None), carried_states(model)

    def forward(input_ids: Tensor, positions: Tensor, *received: Tensor) -> Any:
        """[B, L], [B, L], received tensors [B * L, H] -> what the model returns, in rows."""
        tokens = input_ids if part.keeps_axes else input_ids.view(-1)
        if part.keeps_axes:
            received = tuple(x.view(*tokens.shape, *x.shape[1:]) for x in received)
        named = dict(zip(part.intermediates, received, strict=True))
        result = model(
            input_ids=tokens,
            positions=positions.view(tokens.shape),
            intermediate_tensors=None if part.is_first else IntermediateTensors(named),
            inputs_embeds=None,
            **_embedded_by_layer(model, tokens),
        )
        if states is not None:
            result = states.added_to(result, carried, named, is_last=part.is_last)
        return in_rows(result) if part.keeps_axes else result

    return forward


def _embedded_by_layer(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return Gemma-3n's per-layer embeddings, which vLLM's text class expects from its caller.

    tokens [T] to [T, layers, width].
    """
    embed = getattr(getattr(model, "model", None), "get_per_layer_input_embeddings", None)
    if embed is None:
        return {}
    layers = model.config.num_hidden_layers
    return {"per_layer_inputs": embed(tokens).unflatten(-1, (layers, -1))}
