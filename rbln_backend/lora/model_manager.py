"""vLLM's LoRA layers over a loaded model, with slots of our own in place of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.utils import is_in_target_modules

from rbln_backend.collectives import groups
from rbln_backend.devices.port import Compiler
from rbln_backend.limits import LORA_MODEL
from rbln_backend.lora.adapter_files import Target
from rbln_backend.lora.experts import (
    AdaptedExperts,
    ExpertLayer,
    ExpertSizes,
    adaptable_experts,
    expert_names,
)
from rbln_backend.lora.layers import (
    Adapted,
    AdaptedHead,
    AdaptedLinear,
    RblnLogitsProcessor,
    RblnPunicaWrapper,
    adaptable_modules,
    lm_heads,
)
from rbln_backend.lora.slots import MatrixStack, SlotStack


def slot_bytes(
    model: nn.Module, lora: LoRAConfig, item_bytes: int, *, linear_only: bool = False
) -> int:
    """Bytes of ``max_loras`` slots over all layers that adapters may change.

    ``model`` need have no weights; edges that are filled up are left out. ``linear_only``: without
    experts and heads, as on an NPU.
    """
    rank, packed = lora.max_lora_rank, getattr(model, "packed_modules_mapping", None)
    sizes: dict[str, int] = {}
    for name in adaptable_modules(model):
        layer: Any = model.get_submodule(name)
        outputs = getattr(layer, "output_sizes", None) or [layer.output_size]
        sizes[name] = rank * (len(outputs) * layer.input_size + sum(outputs))
    for name, runner in () if linear_only else adaptable_experts(model):
        sizes[name] = ExpertSizes.of(runner).elements(rank)
    for name, _, head in () if linear_only else lm_heads(model):
        sizes[name] = rank * (head.embedding_dim + head.num_embeddings_per_partition)
    wanted = (
        size
        for name, size in sizes.items()
        if is_in_target_modules(name, lora.target_modules, packed)
    )
    return sum(wanted) * lora.max_loras * item_bytes


class RblnLoraModelManager(LoRAModelManager):
    """Wraps the projections of attention and MLPs, experts and LM head; embeddings stay as is."""

    def __init__(self, model: nn.Module, *args: Any, compiler: Compiler, **options: Any) -> None:
        """``compiler``: of the device that has the slots."""
        self._compiler = compiler
        self.layers: dict[str, Adapted] = {}
        self.targets: dict[str, Target] = {}
        super().__init__(model, *args, **options)  # type: ignore[arg-type]  # checked by upstream
        # An adapter is one for all stages, each of which takes what is its own.
        stages = groups().get("pp")
        if stages is not None:
            gathered = [self.targets] * len(stages.ranks)
            dist.all_gather_object(gathered, self.targets, group=stages.host_group)
            self.targets = {name: target for each in gathered for name, target in each.items()}
        if not self.targets:
            raise LORA_MODEL.refusal(type(model).__name__)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return all stacks by their name in every process; shapes as in ``SlotStack``."""
        return {
            f"{name}.{part}": tensor
            for name, layer in self.layers.items()
            for part, tensor in layer.tensors().items()
        }

    @property
    def stacks(self) -> dict[str, MatrixStack]:
        """Return the slots of each layer, on an NPU."""
        of_linears = {
            n: layer.stack for n, layer in self.layers.items() if isinstance(layer, AdaptedLinear)
        }
        return {n: stack for n, stack in of_linears.items() if isinstance(stack, MatrixStack)}

    def first_product(self, hidden: Tensor) -> Tensor:
        """Return what the adapters of the first layer make of hidden [B, 1, inputs], on an NPU."""
        name, stack = next(iter(self.stacks.items()))
        return stack.product(hidden, self._source(name).rows)

    def images(self, adapter: LoRAModel) -> dict[str, Any]:
        """An adapter as its layers' slots hold it, its scale multiplied in; consumes ``adapter``.

        Its modules are among ``targets``. Runs in any thread. Raises ``AdapterError``.
        """
        # Llama-4's loader orders the outputs of q and k like this.
        turn: Any = getattr(self.model, "permute_qk_weight_for_rotary", None)
        for name, weights in adapter.loras.items() if turn is not None else ():
            _, weights.lora_b = turn(f"{name}.weight", weights.lora_b)
        self._create_merged_loras_inplace(adapter)
        images = {name: layer.image(adapter) for name, layer in self.layers.items()}
        return {name: image for name, image in images.items() if image is not None}

    def write(self, slot: int, images: dict[str, Any]) -> None:
        for name, layer in self.layers.items():
            layer.write(slot, images.get(name))

    def _create_lora_modules(self) -> None:
        self._adaptable = frozenset(adaptable_modules(self.model))
        self.supported_lora_modules = sorted({name.rpartition(".")[2] for name in self._adaptable})
        on_host, experts = self._compiler.capabilities.runs_on_host, []
        if on_host:
            experts = [pair for pair in adaptable_experts(self.model) if self._is_wanted(pair[0])]
        # Some models name them after their parameters, which wrapping renames.
        names = expert_names(self.model) if experts else {}
        super()._create_lora_modules()  # type: ignore[no-untyped-call]
        # Upstream's layers for experts are made for its own kernels.
        for name, runner in experts:
            layer = ExpertLayer(name, runner, names)
            adapted = AdaptedExperts(layer, self._source(name), self._allocate)
            method: Any = runner.routed_experts.quant_method
            method.experts.adapters = adapted
            self._add_layer(name, adapted, layer.targets())
        for name, processor, head in lm_heads(self.model) if on_host else ():
            if self._is_wanted(name) and isinstance(processor, RblnLogitsProcessor):
                processor.adapters = AdaptedHead(name, head, self._source(name), self._allocate)
                self._add_layer(name, processor.adapters, processor.adapters.targets())

    def _match_target_modules(self, module_name: str) -> bool:
        # Upstream asks nothing else of a module where --lora-target-modules chooses.
        return module_name in self._adaptable and bool(super()._match_target_modules(module_name))

    def register_module(self, module_name: str, module: BaseLayerWithLoRA) -> None:
        super().register_module(module_name, module)
        assert isinstance(module, BaseLinearLayerWithLoRA)
        source = self._source(module_name)
        self.layers[module_name] = AdaptedLinear(module_name, module, source, self._allocate)

    def _register_packed_modules(self, module_full_name: str) -> None:
        super()._register_packed_modules(module_full_name)
        layer = self.layers[module_full_name]
        assert isinstance(layer, AdaptedLinear)
        inputs, outputs = layer.whole()
        parts = self.packed_modules.get(module_full_name)
        if parts is None:
            self.targets[module_full_name] = Target.linear(inputs, sum(outputs))
        elif len(parts) == len(outputs):
            for part, size in zip(parts, outputs, strict=True):
                self.targets[part] = Target.linear(inputs, size)

    def _add_layer(self, name: str, layer: Adapted, targets: dict[str, Target]) -> None:
        self.layers[name] = layer
        self.targets |= targets
        self.supported_lora_modules.append(name.rpartition(".")[2])

    def _is_wanted(self, name: str) -> bool:
        return bool(super()._match_target_modules(name))

    def _source(self, name: str) -> RblnPunicaWrapper:
        wrapper = self._get_punica_wrapper(name)
        assert isinstance(wrapper, RblnPunicaWrapper)
        return wrapper

    def _allocate(self, *, inputs: int, outputs: Sequence[int]) -> SlotStack:
        config, compiler = self.lora_config, self._compiler
        sizes: dict[str, Any] = {
            "slots": config.max_loras,
            "rank": config.max_lora_rank,
            "inputs": inputs,
            "outputs": outputs,
            "dtype": config.lora_dtype,
        }
        if compiler.capabilities.runs_on_host:
            return SlotStack.allocate(**sizes)
        return MatrixStack.on_device(**sizes, resident=compiler.resident)
