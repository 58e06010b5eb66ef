"""The draft model of an engine: Medusa's heads or a layer, a part of the served model.

As a part of it its weights are named, packed, counted and moved to huge pages as the others are.
"""

from __future__ import annotations

import copy
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.sequence import IntermediateTensors

from rbln_backend.buckets import DRAFT_LAYERS, EAGLE, EAGLE3
from rbln_backend.collectives import receive_from_first_stage, send_to_last_stage
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.speculation.text_drafts import get_draft_model

GraphFunction = Callable[..., Any]


def add_draft_model(
    model: nn.Module,
    config: VllmConfig,
    make: Callable[[VllmConfig, ModelConfig], nn.Module],
    has_embedding: bool,
) -> None:
    """Add the draft model to ``model``, if ``config`` names one; of pipeline stages to the last.

    The other stages carry what it reads. ``make`` returns it from its engine's and its own
    configuration. ``has_embedding``: a layer has another embedding than ``model``, see
    ``has_own_embedding``.

    Raises ``UnsupportedModelError`` for one of another size, and for a checkpoint that lacks
    weights or has others.
    """
    speculation = get_draft_model(config)
    if speculation is None:
        return
    draft_config = speculation.draft_model_config
    _check_sizes(draft_config, config.model_config, reads_layers=speculation.method == EAGLE3)
    if not get_pp_group().is_last_rank:
        if speculation.method == EAGLE3:
            return_layers(None, model, draft_config)
        if speculation.method in DRAFT_LAYERS and get_pp_group().is_first_rank:
            table = served_embedding(model).weight
            if not (table.is_meta or config.load_config.load_format == "dummy"):
                send_to_last_stage(table.data)
        return
    alone = config
    if config.parallel_config.pipeline_parallel_size > 1:
        # The layer is whole in its stage, and vLLM adds it to the same engine; it numbers an EAGLE
        # layer by the served model's layers, of all stages.
        alone = copy.copy(config)
        alone.parallel_config = copy.copy(config.parallel_config)
        alone.parallel_config.pipeline_parallel_size = 1
    try:
        draft = make(alone, draft_config)
    except ValueError as error:
        # vLLM's message names the weights that a checkpoint lacks, but not the checkpoint.
        number = speculation.num_speculative_tokens
        raise UnsupportedModelError(
            f"draft model {draft_config.model} with num_speculative_tokens {number}: {error}"
        ) from error
    except KeyError as error:
        # vLLM's readers of MTP layers look up a parameter for each tensor.
        raise UnsupportedModelError(
            f"draft model {draft_config.model}: no part of {draft_config.architecture} has the "
            f"tensor {error}"
        ) from error
    is_loaded = config.load_config.load_format != "dummy"
    if speculation.method == EAGLE3:
        return_layers(draft, model, draft_config)
        if is_loaded:
            check_tables(draft, model, draft_config)
    if speculation.method in DRAFT_LAYERS:
        _share_tables(draft, model, draft_config.model, is_loaded=is_loaded, has_own=has_embedding)
    model.add_module(PART, draft)


def _share_tables(draft: Any, served: Any, name: str, *, is_loaded: bool, has_own: bool) -> None:
    """Give a layer the served model's LM head, and its embedding unless ``has_own``.

    EAGLE-3's LM head is its own: it may have another vocabulary. The embedding of the first
    pipeline stage is copied, if it ``is_loaded``.

    Raises ``UnsupportedModelError`` for another embedding of the checkpoint ``name`` that
    ``has_own`` does not state.
    """
    if not hasattr(draft, "draft_id_to_target_id"):
        draft.lm_head = served.lm_head
    for part in draft.modules():
        # MTP layers of some families have an LM head each, which vLLM replaces as well.
        if hasattr(part, "shared_head"):
            part.shared_head.head = served.lm_head
    embedding, tables = draft.model.embed_tokens, served_embedding(served)
    is_read = getattr(draft, "has_own_embed_tokens", False)
    is_elsewhere = not hasattr(tables, "weight")
    if get_pp_group().world_size > 1 and is_loaded and not embedding.weight.is_meta:
        receive_from_first_stage(embedding.weight.data if is_elsewhere and not is_read else None)
    if is_elsewhere or has_own or embedding.weight.shape != tables.weight.shape:
        return
    if is_read and not torch.equal(embedding.weight, tables.weight):
        raise UnsupportedModelError(
            f"draft model {name}: embed_tokens.weight must be in a file *.safetensors, *.bin or "
            "*.pt"
        )
    draft.model.embed_tokens = tables


def _check_sizes(draft_config: ModelConfig, served: ModelConfig, *, reads_layers: bool) -> None:
    hf_config = draft_config.hf_config
    width = (
        reads_layers and getattr(hf_config, "target_hidden_size", None)
    ) or draft_config.get_hidden_size()
    expected = {
        "hidden_size": (width, served.get_hidden_size(), "the served model's"),
        "vocab_size": (hf_config.vocab_size, served.get_vocab_size(), "the served model's"),
    }
    if hasattr(hf_config, "truncated_vocab_size"):
        # vLLM reads no checkpoint with a token_map: it takes it for a weight that is missing.
        sizes = hf_config.truncated_vocab_size, hf_config.vocab_size
        expected["truncated_vocab_size"] = (*sizes, "vocab_size")
    for name, (value, required, whose) in expected.items():
        if value != required:
            raise UnsupportedModelError(
                f"draft model {draft_config.model}: {name} must be {whose}, {required}, got {value}"
            )


def draft_model(model: nn.Module) -> Any:
    """Return the draft model of ``model``, None without one."""
    return getattr(model, PART, None)


def draft_function(
    model: nn.Module, *, by_sdk: bool, keeps_axes: bool
) -> tuple[GraphFunction, tuple[str, ...]]:
    """Return the function of a draft model's graphs and the names of its inputs.

    Hidden [B, H] to drafts int32 [B, heads]; or last_rows [R], input_ids and positions [B, L] and
    hidden [B * L, H] to drafts int32 [R] and hidden states [R, H]. ``by_sdk``: the graphs end in
    the SDK's argmax. ``keeps_axes``: layers take [B, L, H], else rows.
    """
    draft = draft_model(model)

    def pick(logits: Tensor) -> Tensor:
        """Logits [B, V] to tokens int32 [B]."""
        if by_sdk:
            return cast("Tensor", torch.ops.rbln.argmax(logits))
        return cast("Tensor", torch.ops.rbln_emulator.greedy(logits).view(-1))

    def heads(hidden: Tensor) -> tuple[Tensor]:
        """[B, H] -> drafts int32 [B, heads]."""
        rows = zip(draft(hidden), draft.lm_heads, strict=True)
        tokens = [pick(draft.logits_processor(head, states)) for states, head in rows]
        return (torch.stack(tokens, dim=1),)

    def layer(
        last_rows: Tensor, input_ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[R], [B, L], [B, L], [B * L, H] -> drafts int32 [R], hidden states [R, H]."""
        if keeps_axes:
            states = in_rows(draft(input_ids, positions, hidden.view(*input_ids.shape, -1)))
        else:
            states = draft(input_ids.view(-1), positions.view(-1), hidden)
        # Those for the LM head, and those that the next token is drafted with.
        for_head, following = states if isinstance(states, tuple) else (states, states)
        last = for_head.index_select(0, last_rows)
        tokens = pick(draft_logits(draft, last))
        return tokens, last if following is for_head else following.index_select(0, last_rows)

    if hasattr(draft, "lm_heads"):
        return heads, ("hidden",)
    return layer, ("last_rows", "input_ids", "positions", "hidden")


# EAGLE-3's part in the served model's graphs: hidden states of several layers, combined.
#
# vLLM's classes return those of the layers that a draft model names; a linear layer of the draft
# model makes one row of them. So a step has one more output of the draft model's width.


PART = "draft_model"
"""The name of the draft model in the served one."""

_LAYERS = "eagle_aux_hidden_state_layer_ids"


def return_layers(draft: Any, served: Any, draft_config: ModelConfig) -> None:
    """Make ``served`` return the hidden states of the layers that ``draft`` reads.

    ``draft`` is None in a pipeline stage without the draft model, which hands them over. Raises
    ``UnsupportedModelError`` for layers that the served model does not have.
    """
    hf_config = draft_config.hf_config
    options = getattr(hf_config, "eagle_config", None) or {}
    if not options.get("use_aux_hidden_state", True):
        return
    named = getattr(hf_config, _LAYERS, None) or options.get(_LAYERS)
    layers = tuple(named or served.get_eagle3_default_aux_hidden_state_layers())
    last, count = len(served.model.layers), len(layers)
    if draft is not None:
        count = draft.model.fc_input_size // served.config.hidden_size
    if len({*layers} & {*range(last + 1)}) != count or len(layers) != count:
        raise UnsupportedModelError(
            f"draft model {draft_config.model}: {_LAYERS} must be {count} layers from 0 to {last}, "
            f"got {list(layers)}"
        )
    served.set_aux_hidden_state_layers(layers)
    inner = served.model
    if get_pp_group().world_size > 1 and not inner.supports_aux_hidden_states_over_pp:
        served.layer_states = LayerStates(inner)


def reads_layers(draft: Any) -> bool:
    """Return True for a draft model that reads hidden states of several layers."""
    return bool(getattr(draft.model, "use_aux_hidden_state", False))


def check_tables(draft: Any, served: Any, draft_config: ModelConfig) -> None:
    """Fill the LM head of ``draft`` from the served model's where its checkpoint has none.

    Raises ``UnsupportedModelError`` if that has another size, or the embedding that is shared.
    """
    head, table = draft.lm_head.weight, draft.model.embed_tokens.weight
    if head.is_meta:
        return
    served_weight = getattr(served_embedding(served), "weight", None)
    # In another pipeline stage it has as many rows.
    shape = (
        [len(table), served.config.hidden_size]
        if served_weight is None
        else list(served_weight.shape)
    )
    if list(table.shape) != shape and not draft.has_own_embed_tokens:
        raise UnsupportedModelError(
            f"draft model {draft_config.model}: embed_tokens.weight must be in the checkpoint, "
            f"because the served model's has another size, {shape}"
        )
    if draft.has_own_lm_head:
        return
    served_weight = getattr(served.lm_head, "weight", None)
    if (
        served_weight is None
        or served_weight.shape != head.shape
        or served_weight.dtype != head.dtype
    ):
        raise UnsupportedModelError(
            f"draft model {draft_config.model}: lm_head.weight must be in the checkpoint, because "
            "the served model's has another size or is quantised"
        )
    head.data.copy_(served_weight)


def served_embedding(served: Any) -> Any:
    """Return the embedding of a served model, which has two names in vLLM's classes.

    It has no weight in a pipeline stage that does not need it.
    """
    inner = served.model
    return inner.embed_tokens if hasattr(inner, "embed_tokens") else inner.embedding


def draft_logits(draft: Any, hidden: Tensor) -> Tensor:
    """Hidden states [R, H] to logits [R, V] of a layer, V of its own vocabulary if it has one."""
    if getattr(draft, "draft_id_to_target_id", None) is None:
        return cast("Tensor", draft.compute_logits(hidden))
    return cast("Tensor", draft.logits_processor(draft.lm_head, hidden))


def read_hidden(model: nn.Module, result: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a model's hidden states [rows, H], and those of its layers for EAGLE-3.

    ``result`` is what vLLM's class returns: hidden states, with those of the layers if a draft
    model reads them, [rows, H] each. They become one [rows, the draft model's H].
    """
    if not isinstance(result, tuple):
        return cast("Tensor", result), ()
    hidden, layers = result
    draft: Any = getattr(model, PART)
    return hidden, (draft.combine_hidden_states(torch.cat(layers, dim=-1)),)


# Hidden states of the layers that a draft model reads, carried over pipeline stages.
#
# Some of vLLM's classes hand them to the next stage. Others compute those of their own stage and
# drop them; some number the layers of each stage from 0. There ``LayerStates`` collects them.


_COUNTS_IN_STAGE = ("MiniMaxM2Model",)
"""vLLM's classes that number the layers of each stage from 0."""


class CarriedStates(NamedTuple):
    """Names of the hidden states that a stage has for the next one, in the order of the layers."""

    received: tuple[str, ...] = ()
    """Of the stages before."""
    computed: tuple[str, ...] = ()
    """Of this stage."""


def carried_states(served: Any) -> CarriedStates:
    """Return the hidden states that this stage of ``served`` receives and computes.

    State n is what layer n reads. The stage that computes it has layer n - 1; the first one has
    state 0.
    """
    inner: Any = getattr(served, "model", None)
    layers = getattr(inner, "aux_hidden_state_layers", ())
    if not layers:
        return CarriedStates()
    names = tuple(f"{inner.AUX_HIDDEN_STATE_KEY}{number}" for number in range(len(layers)))
    first, end = _places(inner)
    return CarriedStates(names[:first], names[first:end])


def _places(inner: Any) -> tuple[int, int]:
    """Return the first place of this stage's states in those of all stages, and the end."""
    layers = inner.aux_hidden_state_layers
    first = 0 if get_pp_group().is_first_rank else bisect_right(layers, inner.start_layer)
    return first, bisect_right(layers, inner.end_layer)


class LayerStates:
    """Collects the hidden states of a stage, and hands them over with its result."""

    def __init__(self, inner: EagleModelMixin) -> None:
        """``inner``: vLLM's module of the layers, which passes each state to a method of its own.

        It must know the layers already.
        """
        first, end = _places(inner)
        before = inner.start_layer if type(inner).__name__ in _COUNTS_IN_STAGE else 0
        self._wanted = [layer - before for layer in inner.aux_hidden_state_layers[first:end]]
        self._found: list[Tensor] = []
        inner._maybe_add_hidden_state = self._add  # type: ignore[method-assign]

    def _add(
        self,
        aux_hidden_states: list[Tensor],
        layer_idx: int,
        hidden_states: Tensor,
        residual: Tensor | None,
    ) -> list[Tensor]:
        """As vLLM's method, tensors [rows, H]; the list stays empty."""
        if layer_idx in self._wanted:
            self._found.append(hidden_states if residual is None else hidden_states + residual)
        return aux_hidden_states

    def added_to(
        self, result: Any, carried: CarriedStates, received: Mapping[str, Tensor], *, is_last: bool
    ) -> Any:
        """Return a stage's ``result`` with its states, in the last one after those ``received``.

        Hidden states and each of their layers' are [rows, H].
        """
        states = dict(zip(carried.computed, self._found, strict=True))
        self._found.clear()
        if is_last:
            return result, [*(received[name] for name in carried.received), *states.values()]
        return IntermediateTensors({**result.tensors, **states})


# The embedding of EAGLE's layers: their own, or the served model's.
#
# A layer's graph reads one or the other. That follows from the weights, so that the keys of stored
# graphs contain it, and it is read from the checkpoints' files: some commands load no weights.


_NAME = "embed_tokens.weight"
_ROWS = 4096
"""Rows that are compared together, in the model's dtype."""


def has_own_embedding(config: VllmConfig) -> bool:
    """Return True if the draft layer's checkpoint has another embedding than the served model's.

    False where it has none or the same, with dummy weights, and with checkpoints that are not on
    this host.
    """
    speculation = get_draft_model(config)
    if speculation is None or speculation.method not in (EAGLE, EAGLE3):
        return False
    if config.load_config.load_format == "dummy":
        return False
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    cache = config.load_config.download_dir
    draft_files = _get_files(speculation.draft_model_config, cache)
    return _is_another(draft_files, _get_files(config.model_config, cache), dtype)


_Files = tuple[tuple[Path, int], ...]
"""Files with their times in nanoseconds."""


def _get_files(model: ModelConfig, cache: str | None) -> _Files:
    """Return the files with weights of a folder, or of a model of the hub in its ``cache``."""
    from huggingface_hub import snapshot_download

    folder = Path(model.model)
    if not folder.is_dir():
        with suppress(OSError, ValueError):
            snapshot = snapshot_download(
                model.model, revision=model.revision, cache_dir=cache, local_files_only=True
            )
            folder = Path(snapshot)
    for ending in ("*.safetensors", "*.bin", "*.pt"):
        if files := sorted(folder.glob(ending)):
            return tuple((file, file.stat().st_mtime_ns) for file in files)
    return ()


@lru_cache(maxsize=4)
def _is_another(draft: _Files, served: _Files, dtype: torch.dtype) -> bool:
    embedding = _embedding(draft)
    if embedding is None:
        return False
    other = _embedding(served)
    if other is None or other.shape != embedding.shape:
        return True
    pairs = zip(embedding.split(_ROWS), other.split(_ROWS), strict=True)
    return not all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in pairs)


def _embedding(files: _Files) -> Tensor | None:
    """Return the embedding [V, H] in ``files``, None if there is none."""
    for file, _ in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    if name.endswith(_NAME):
                        return cast("Tensor", opened.get_tensor(name))
            continue
        # Files of torch before 1.6 are no archives.
        is_archive = zipfile.is_zipfile(file)
        loaded = torch.load(file, map_location="cpu", mmap=is_archive, weights_only=True)
        for name, tensor in loaded.items():
            if name.endswith(_NAME):
                return cast("Tensor", tensor)
    return None


def in_rows(result: Any) -> Any:
    """Return what a model returns, tensors [B, L, ...], as rows [B * L, ...]."""
    if isinstance(result, Tensor):
        return result.flatten(0, 1)
    if isinstance(result, IntermediateTensors):
        return IntermediateTensors({name: in_rows(x) for name, x in result.tensors.items()})
    return type(result)(in_rows(x) for x in result)
