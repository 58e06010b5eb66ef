"""Checks, reads and packs adapters in PEFT's format, in a background thread while graphs run."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

from rbln_backend.devices.port import Compiler
from rbln_backend.errors import AdapterError
from rbln_backend.host.processes import lower_thread_priority
from rbln_backend.lora.adapter_files import (
    DigestedFiles,
    TensorName,
    check_config,
    check_modules,
    check_tensors,
)
from rbln_backend.lora.model_manager import RblnLoraModelManager

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter that is ready to be copied into a slot."""

    lora_int_id: int
    name: str
    images: dict[str, Any]
    """By layer; see ``Adapted``."""
    digest: str | None
    """Of its files; None in an engine without KV tiers, which does not need it."""


class AdapterReader(WorkerLoRAManager):
    """Reads adapters for the model whose layers ``create_lora_manager`` wrapped."""

    _adapter_manager: RblnLoraModelManager
    hashes_files = False
    """True in an engine with KV tiers."""

    def __init__(self, vllm_config: VllmConfig, compiler: Compiler) -> None:
        super().__init__(vllm_config, torch.device("cpu"), {})
        self._manager_cls: Any = partial(RblnLoraModelManager, compiler=compiler)

    @property
    def layers(self) -> RblnLoraModelManager:
        return self._adapter_manager

    def read(self, request: LoRARequest) -> PackedAdapter:
        """Check and read an adapter; raises ``AdapterError`` naming what does not fit."""
        digest = None
        try:
            self._check(request)
            files = [Path(request.lora_path) / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
            read = DigestedFiles(files)
            loaded: Any = self._load_adapter(request)
            for module, weights in loaded.loras.items():
                for side, matrix in (("A", weights.lora_a), ("B", weights.lora_b)):
                    parts = matrix if isinstance(matrix, list) else [matrix]
                    # They would be in every answer.
                    if not all(part is None or torch.isfinite(part).all() for part in parts):
                        raise AdapterError(
                            f"lora_{side}.weight of {module!r} has NaN or infinite values"
                        )
            if self.hashes_files:
                digest = read.digest()
            images = self.layers.images(loaded)
        except AdapterError as error:
            raise AdapterError(f"adapter {request.lora_name!r}: {error}") from error
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise AdapterError(
                f"adapter {request.lora_name!r} cannot be read from {request.lora_path}: {error}"
            ) from error
        return PackedAdapter(request.lora_int_id, request.lora_name, images, digest)

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
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            names = file.keys()
            shapes = {name: file.get_slice(name).get_shape() for name in names}
        check_tensors(shapes, config["r"], self.layers.targets, self._parse)
        check_modules(config, names, self.layers.targets, self._parse)

    def _parse(self, name: str) -> TensorName | None:
        mapper: Any = getattr(self.layers.model, "hf_to_vllm_mapper", None)
        renaming = mapper.get_rename_mapper() if mapper is not None else None
        is_copy = is_base_embedding_weights(name)
        matrix = name.replace(".base_layer.weight", ".lora_B.weight") if is_copy else name
        try:
            module, is_a = parse_fine_tuned_lora_name(matrix, renaming)
        except ValueError:
            return None
        return TensorName(module, module, None if is_copy else is_a)


State = Literal["reading", "ready", "failed"]


class Staging:
    """Reads one adapter after the other. Its methods are called from one thread, the engine's."""

    def __init__(self, reader: AdapterReader) -> None:
        self._reader = reader
        self._futures: dict[int, Future[PackedAdapter]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, request: LoRARequest) -> None:
        """Start reading; discards an adapter that was staged under the same id."""
        if self._pool is None:
            # Not before: the capture of graphs forks this process.
            self._pool = ThreadPoolExecutor(1, "lora-reader", initializer=lower_thread_priority)
        self.drop(request.lora_int_id)
        self._futures[request.lora_int_id] = self._pool.submit(self._reader.read, request)

    def state(self, lora_int_id: int) -> tuple[State, str]:
        """Return the state and the reason of a failure; ``AdapterError`` for an unknown id."""
        future = self._futures.get(lora_int_id)
        if future is None:
            raise AdapterError(f"no adapter with id {lora_int_id} is staged")
        if not future.done():
            return "reading", ""
        error = future.exception()
        return ("failed", str(error)) if error is not None else ("ready", "")

    def take(self, request: LoRARequest) -> PackedAdapter:
        """Return the adapter, read now unless it was staged; raises ``AdapterError``."""
        future = self._futures.pop(request.lora_int_id, None)
        return self._reader.read(request) if future is None else future.result()

    def drop(self, lora_int_id: int) -> bool:
        future = self._futures.pop(lora_int_id, None)
        if future is not None:
            future.cancel()
        return future is not None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
