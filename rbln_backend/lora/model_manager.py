"""vLLM's LoRA layers over a loaded model, with slots of our own in place of their weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from rbln_backend.lora.shares import Matrices, WholeLayer, share
from rbln_backend.lora.slot_stack import LayerImage, SlotStack
from rbln_backend.parallel.collectives import groups
from rbln_backend.unsupported import LORA_MODEL
from rbln_backend.vllm_compat.lora import (
    BaseLayerWithLoRA,
    BaseLinearLayerWithLoRA,
    LoRAModel,
    LoRAModelManager,
    adaptable_modules,
)


class Target(NamedTuple):
    """A matrix that an adapter may change, as its file names it; its size over all ranks."""

    inputs: int
    outputs: int


class RblnLoraModelManager(LoRAModelManager):
    """Wraps the linear layers of attention and MLPs; embeddings, LM head and experts stay as is."""

    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        self.stacks: dict[str, SlotStack] = {}
        self.targets: dict[str, Target] = {}
        super().__init__(model, *args, **options)  # type: ignore[arg-type]  # checked by upstream
        # An adapter is one for all stages, each of which takes what is its own.
        self.targets = _of_every_stage(self.targets)
        if not self.targets:
            raise LORA_MODEL.refusal(type(model).__name__)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots of all layers."""
        return sum(stack.num_bytes for stack in self.stacks.values())

    def tensors(self) -> dict[str, Tensor]:
        """Every stack by a name that another process finds it under."""
        named = {f"{name}.a": stack.a for name, stack in self.stacks.items()}
        for name, stack in self.stacks.items():
            named |= {f"{name}.b{index}": matrix for index, matrix in enumerate(stack.b)}
        return named

    def images(self, adapter: LoRAModel) -> dict[str, LayerImage]:
        """An adapter as its layers' slots hold it, its scale multiplied in; consumes ``adapter``.

        Its modules are among ``targets``. Runs in any thread.
        """
        self._create_merged_loras_inplace(adapter)
        found = {}
        for name, stack in self.stacks.items():
            weights = adapter.get_lora(name)
            if weights is not None:
                layer = self._layer(name)
                slices = _slices(weights.lora_a, weights.lora_b, WholeLayer.of(layer).outputs)
                found[name] = stack.image(*share(layer, *slices))
        return found

    def write(self, slot: int, images: dict[str, LayerImage]) -> None:
        """Put an adapter into ``slot`` of every layer."""
        for name, stack in self.stacks.items():
            stack.write(slot, images.get(name))

    def _create_lora_modules(self) -> None:
        self._adaptable = frozenset(adaptable_modules(self.model))
        self.supported_lora_modules = sorted({name.rpartition(".")[2] for name in self._adaptable})
        super()._create_lora_modules()  # type: ignore[no-untyped-call]

    def _match_target_modules(self, module_name: str) -> bool:
        # Upstream asks nothing else of a module where --lora-target-modules chooses.
        return module_name in self._adaptable and bool(super()._match_target_modules(module_name))

    def register_module(self, module_name: str, module: BaseLayerWithLoRA) -> None:
        super().register_module(module_name, module)
        assert isinstance(module, BaseLinearLayerWithLoRA)
        outputs = tuple(stacked.shape[2] for stacked in module.lora_b_stacked)
        stack = SlotStack.allocate(
            slots=self.lora_slots,
            rank=self.lora_config.max_lora_rank,
            inputs=module.lora_a_stacked[0].shape[3],
            outputs=outputs,
            dtype=module.lora_a_stacked[0].dtype,
        )
        module.lora_a_stacked, module.lora_b_stacked = (stack.a,), stack.b
        module.output_slices = outputs
        self.stacks[module_name] = stack

    def _register_packed_modules(self, module_full_name: str) -> None:
        super()._register_packed_modules(module_full_name)
        whole = WholeLayer.of(self._layer(module_full_name))
        parts = self.packed_modules.get(module_full_name)
        if parts is None:
            self.targets[module_full_name] = Target(whole.inputs, sum(whole.outputs))
        elif len(parts) == len(whole.outputs):
            for part, outputs in zip(parts, whole.outputs, strict=True):
                self.targets[part] = Target(whole.inputs, outputs)

    def _layer(self, name: str) -> BaseLinearLayerWithLoRA:
        layer = self.modules[name]
        assert isinstance(layer, BaseLinearLayerWithLoRA)
        return layer


def _slices(a: Any, b: Any, outputs: tuple[int, ...]) -> tuple[Matrices, Matrices]:
    """The matrices per output slice, whether the adapter has one for each or one for all."""
    if isinstance(a, Tensor):
        return [a] * len(outputs), list(b.split(list(outputs)))
    return a, b


def _of_every_stage(mine: dict[str, Target]) -> dict[str, Target]:
    """The targets of all pipeline stages; every rank calls it at the same point of its start."""
    stages = groups().get("pp")
    if stages is None:
        return mine
    told = [mine] * len(stages.ranks)
    dist.all_gather_object(told, mine, group=stages.host_group)
    return {name: target for targets in told for name, target in targets.items()}
