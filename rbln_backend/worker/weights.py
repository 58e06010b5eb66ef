"""Loads a model's weights, and refuses a checkpoint that leaves elements of a parameter unwritten.

vLLM counts every parameter of a layer with a quantisation method as loaded, which all linear
layers, embeddings and experts have, and it tracks nothing of quantised checkpoints. Here the
writes themselves are counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rbln_backend.errors import CheckpointError
from rbln_backend.worker.draft_model import PART

logger = logging.getLogger(__name__)


_OF_CACHES = tuple(
    f".{tensor}_{value}" for tensor in ("k", "v", "q", "prob") for value in ("scale", "zero_point")
)
"""Ends of the names of an FP8 KV cache's scales: 1 where a checkpoint has none."""
_SHARED = ("embed_tokens.weight", "lm_head.weight")
"""What a draft model may take from the served one, which it is given after loading."""
_LISTED, _FEW = 5, 64
_Region = tuple[int, tuple[int, ...], tuple[int, ...]]


class CompleteLoader(DefaultModelLoader):
    """vLLM's loader of safetensors and PyTorch files."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the weights. Raises ``CheckpointError`` with the names of what was not written."""
        self._names = names = set[str]()
        with WrittenElements(model) as written:
            super().load_weights(model, model_config)
        missing = written.missing()
        if model_config.runner_type == "draft":
            missing = [name for name in missing if not name.endswith(_SHARED)]
        if missing:
            raise CheckpointError(_lacking(model_config.model, model, missing, names))

    def _prepare_weights(
        self,
        model_name_or_path: str,
        subfolder: str | None,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[str, list[str], bool]:
        """As vLLM's method, but Hugging Face's files go before Mistral's beside them."""
        folder, patterns = Path(model_name_or_path), allow_patterns_overrides
        both = all(any(folder.glob(f"{name}*.safetensors")) for name in ("model", "consolidated"))
        if self.load_config.load_format == "auto" and patterns is None and both:
            patterns = ["model*.safetensors"]
        return super()._prepare_weights(
            model_name_or_path, subfolder, revision, fall_back_to_pt, patterns
        )

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the names and tensors of the files, as vLLM's method does."""
        for name, tensor in super().get_all_weights(model_config, model):
            self._names.add(name)
            yield name, tensor


def missing_in_files(model: nn.Module, config: VllmConfig) -> str | None:
    """Return what the safetensors files of a folder lack for ``model``, by their headers only.

    ``model`` has parameters on the meta device. None if nothing is missing, for a model of a hub,
    for files of another format, and for a reader of weights that needs their values.
    """
    model_config = config.model_config
    has_files = any(Path(model_config.model).glob("*.safetensors"))
    if config.load_config.load_format == "dummy" or not has_files:
        return None
    loader = CompleteLoader(config.load_config)
    _, files, are_safetensors = loader._prepare_weights(model_config.model, None, None, True, None)
    if not are_safetensors:
        return None
    names: set[str] = set()
    with WrittenElements(model) as written:
        try:
            model.load_weights(_shapes(files, names))  # type: ignore[operator]
        except (RuntimeError, NotImplementedError) as error:
            logger.debug(
                "The files of %s are checked by the start alone: %s", model_config.model, error
            )
            return None
    drafts = f"{PART}."
    missing = [name for name in written.missing() if not name.startswith(drafts)]
    return _lacking(model_config.model, model, missing, names) if missing else None


def _shapes(files: Sequence[str], names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``files`` without their values, but for those of a few elements."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                part = tensors.get_slice(name)
                shape = part.get_shape()
                names.add(name)
                # Readers take scales of a tensor as numbers.
                if math.prod(shape) <= _FEW:
                    yield name, tensors.get_tensor(name)
                else:
                    yield name, torch.empty(shape, dtype=part[:0].dtype, device="meta")


def _lacking(path: str, model: nn.Module, missing: Sequence[str], names: Collection[str]) -> str:
    listed = [name for parameter in missing for name in _in_files(model, parameter, names)]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return (
        f"the files of {path} lack weights of this model: {', '.join(listed[:_LISTED])}{more}; "
        "fetch the checkpoint again"
    )


class WrittenElements(TorchDispatchMode):
    """Counts the elements of a model's parameters that are written inside its ``with`` block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        # Held, so that no other storage gets the address of one that is replaced.
        self._storages = [parameter.untyped_storage() for parameter in model.parameters()]
        self._written: dict[int, dict[_Region, int]] = {
            storage._cdata: {} for storage in self._storages
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import Dynamo, 0.7 s, to keep it out of `__torch_dispatch__`.
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            # By headers alone, a parameter that its layer gave values keeps them.
            result = args[0]
        else:
            result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            for value, argument in zip(args, func._schema.arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(value)
        return result

    def missing(self) -> list[str]:
        """Return the names of the parameters that were not written as a whole."""
        missing = []
        for name, parameter in self._model.named_parameters():
            regions = self._written.get(parameter.untyped_storage()._cdata)
            # A loader that sets another tensor has its values.
            if regions is None or sum(regions.values()) >= parameter.numel():
                continue
            # Layers create these whether or not their model has them.
            owner, _, kind = name.rpartition(".")
            config = getattr(self._model.get_submodule(owner), "moe_config", None)
            lacks_bias = config is not None and not config.has_bias
            if name.endswith(_OF_CACHES) or (lacks_bias and kind in ("w13_bias", "w2_bias")):
                continue
            missing.append(name)
        return missing

    def _note(self, value: Any) -> None:
        for tensor in pytree.tree_leaves(value):
            regions = self._written.get(tensor.untyped_storage()._cdata)
            if regions is not None:
                region = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
                regions[region] = tensor.numel()


def _in_files(model: nn.Module, parameter: str, names: Collection[str]) -> list[str]:
    """Return what the files call a parameter, or the missing parts where it joins several.

    ``names`` are those of the files' tensors, which may have another prefix.
    """
    module, _, kind = parameter.rpartition(".")
    owner, _, module_name = module.rpartition(".")
    layer = ".".join(owner.split(".")[-3:])
    parts = getattr(model, "packed_modules_mapping", {}).get(module_name, ())
    absent = [
        part for part in parts if not any(name.endswith(f"{layer}.{part}.{kind}") for name in names)
    ]
    return [f"{owner}.{part}.{kind}" for part in absent] or [parameter]
