"""Checks, reads and packs adapters in PEFT's format. Safe in any thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rbln_backend.errors import AdapterError
from rbln_backend.lora.adapter_config import check_config
from rbln_backend.lora.model_manager import RblnLoraModelManager
from rbln_backend.lora.target import Target
from rbln_backend.vllm_compat.lora import (
    LoRARequest,
    WorkerLoRAManager,
    is_base_embedding_weights,
    parse_fine_tuned_lora_name,
)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# How many names a message lists.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter that is ready to be copied into a slot."""

    lora_int_id: int
    name: str
    images: dict[str, Any]
    """By layer; see ``Adapted``."""


class AdapterReader(WorkerLoRAManager):
    """Reads adapters for the model whose layers ``create_lora_manager`` wrapped."""

    _manager_cls = RblnLoraModelManager
    _adapter_manager: RblnLoraModelManager

    @property
    def layers(self) -> RblnLoraModelManager:
        """The wrapped layers."""
        return self._adapter_manager

    def read(self, request: LoRARequest) -> PackedAdapter:
        """Check and read an adapter; raises ``AdapterError`` naming what does not fit."""
        try:
            self._check(request)
            loaded = self._load_adapter(request)
            images = self.layers.images(loaded)
        except AdapterError as error:
            raise AdapterError(f"adapter {request.lora_name!r}: {error}") from error
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise AdapterError(
                f"adapter {request.lora_name!r} cannot be read from {request.lora_path}: {error}"
            ) from error
        return PackedAdapter(request.lora_int_id, request.lora_name, images)

    def _check(self, request: LoRARequest) -> None:
        folder = Path(request.lora_path)
        if request.tensorizer_config_dict:
            raise AdapterError("tensorizer files are not read, only safetensors")
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                # vLLM would look for it on the Hugging Face Hub, or take a pickled file instead.
                raise AdapterError(f"{folder} has no {name}")
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        check_config(config, self.lora_config.max_lora_rank)
        self._check_weights(folder / WEIGHTS_FILE, config["r"])

    def _check_weights(self, path: Path, rank: int) -> None:
        """Check names and shapes of all matrices, read from the file's header."""
        pairs: dict[str, set[bool]] = {}
        for tensor, module, is_a, shape in self._matrices(path):
            wanted = self._target(tensor, module).misfit(shape, rank, is_a=is_a)
            if wanted is not None:
                raise AdapterError(f"{tensor} has shape {shape} instead of {wanted}")
            pairs.setdefault(module, set()).add(is_a)
        if not pairs:
            raise AdapterError(f"{path.name} holds no LoRA matrices")
        for module, parts in pairs.items():
            if len(parts) < len((True, False)):
                missing = "lora_B" if True in parts else "lora_A"
                raise AdapterError(f"{module} has no {missing}")

    def _matrices(self, path: Path) -> Iterator[tuple[str, str, bool, list[int]]]:
        """Yield name, module, True for lora_A, and shape of each tensor."""
        mapper: Any = getattr(self.layers.model, "hf_to_vllm_mapper", None)
        renaming = mapper.get_rename_mapper() if mapper is not None else None
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                if is_base_embedding_weights(name):
                    self._check_copy(name, file.get_slice(name).get_shape(), renaming)
                    continue
                try:
                    module, is_a = parse_fine_tuned_lora_name(name, renaming)
                except ValueError as error:
                    raise AdapterError(f"{name} is no LoRA matrix of a linear layer") from error
                yield name, module, is_a, file.get_slice(name).get_shape()

    def _check_copy(self, name: str, shape: list[int], renaming: Any) -> None:
        """Check the shape of the LM head's copy that PEFT writes beside its adapter."""
        pair = name.replace(".base_layer.weight", ".lora_B.weight")
        module, _ = parse_fine_tuned_lora_name(pair, renaming)
        (head,) = self._target(name, module).shapes
        if shape != [head.outputs, head.inputs]:
            wanted = [head.outputs, head.inputs]
            raise AdapterError(f"{name} has shape {shape}, and the served model's is {wanted}")

    def _target(self, tensor: str, module: str) -> Target:
        target = self.layers.targets.get(module)
        if target is None:
            raise AdapterError(f"{tensor}: {self._why_not(module)}")
        return target

    def _why_not(self, module: str) -> str:
        """Return the reason why ``module``, which is no target, cannot be adapted."""
        suffixes = sorted({name.rpartition(".")[2] for name in self.layers.targets})
        known = ", ".join(suffixes)
        if any(
            target.rpartition(".")[2] == module.rpartition(".")[2] for target in self.layers.targets
        ):
            examples = ", ".join(sorted(self.layers.targets)[:_SHOWN])
            return f"the model has no module {module!r}; it has, among others, {examples}"
        return f"{module.rpartition('.')[2]!r} cannot be adapted; what can is {known}"
