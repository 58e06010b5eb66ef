"""vLLM's LoRA layers over a loaded model, with slots of our own in place of their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rbln_backend.lora.adapted import Adapted, AdaptedLinear
from rbln_backend.lora.expert_layer import (
    ExpertLayer,
    Matrix,
    adaptable_experts,
    expert_names,
)
from rbln_backend.lora.experts import AdaptedExperts
from rbln_backend.lora.lm_head import AdaptedHead, RblnLogitsProcessor, lm_heads
from rbln_backend.lora.punica import RblnPunicaWrapper
from rbln_backend.lora.target import Target
from rbln_backend.parallel.collectives import groups
from rbln_backend.unsupported import LORA_MODEL
from rbln_backend.vllm_compat.lora import (
    BaseLayerWithLoRA,
    BaseLinearLayerWithLoRA,
    LoRAModel,
    LoRAModelManager,
    MoERunner,
    adaptable_modules,
)


class RblnLoraModelManager(LoRAModelManager):
    """Wraps the projections of attention and MLPs, experts and LM head; embeddings stay as is."""

    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        self.layers: dict[str, Adapted] = {}
        self.targets: dict[str, Target] = {}
        super().__init__(model, *args, **options)  # type: ignore[arg-type]  # checked by upstream
        # An adapter is one for all stages, each of which takes what is its own.
        self.targets = _of_every_stage(self.targets)
        if not self.targets:
            raise LORA_MODEL.refusal(type(model).__name__)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots of all layers."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return all stacks by their name in every process; shapes as in ``SlotStack``."""
        return {
            f"{name}.{part}": tensor
            for name, layer in self.layers.items()
            for part, tensor in layer.tensors().items()
        }

    def images(self, adapter: LoRAModel) -> dict[str, Any]:
        """An adapter as its layers' slots hold it, its scale multiplied in; consumes ``adapter``.

        Its modules are among ``targets``. Runs in any thread. Raises ``AdapterError``.
        """
        self._turn_heads(adapter)
        self._create_merged_loras_inplace(adapter)
        images = {name: layer.image(adapter) for name, layer in self.layers.items()}
        return {name: image for name, image in images.items() if image is not None}

    def _turn_heads(self, adapter: LoRAModel) -> None:
        """Order the outputs of q and k as Llama-4's loader orders those of the weights."""
        turn: Any = getattr(self.model, "permute_qk_weight_for_rotary", None)
        for name, weights in adapter.loras.items() if turn is not None else ():
            _, weights.lora_b = turn(f"{name}.weight", weights.lora_b)

    def write(self, slot: int, images: dict[str, Any]) -> None:
        """Put an adapter into ``slot`` of every layer."""
        for name, layer in self.layers.items():
            layer.write(slot, images.get(name))

    def _create_lora_modules(self) -> None:
        self._adaptable = frozenset(adaptable_modules(self.model))
        self.supported_lora_modules = sorted({name.rpartition(".")[2] for name in self._adaptable})
        experts = [pair for pair in adaptable_experts(self.model) if self._is_wanted(pair[0])]
        # Some models name them after their parameters, which wrapping renames.
        names = expert_names(self.model) if experts else {}
        super()._create_lora_modules()  # type: ignore[no-untyped-call]
        # Upstream's layers for these are made for its own kernels.
        self._adapt_experts(experts, names)
        self._adapt_heads()

    def _match_target_modules(self, module_name: str) -> bool:
        # Upstream asks nothing else of a module where --lora-target-modules chooses.
        return module_name in self._adaptable and bool(super()._match_target_modules(module_name))

    def register_module(self, module_name: str, module: BaseLayerWithLoRA) -> None:
        super().register_module(module_name, module)
        assert isinstance(module, BaseLinearLayerWithLoRA)
        config = self.lora_config
        layer = AdaptedLinear(module_name, module, self.lora_slots, config.max_lora_rank)
        self.layers[module_name] = layer

    def _register_packed_modules(self, module_full_name: str) -> None:
        super()._register_packed_modules(module_full_name)
        layer = self.layers[module_full_name]
        assert isinstance(layer, AdaptedLinear)
        whole = layer.whole
        parts = self.packed_modules.get(module_full_name)
        if parts is None:
            self.targets[module_full_name] = Target.linear(whole.inputs, sum(whole.outputs))
        elif len(parts) == len(whole.outputs):
            for part, outputs in zip(parts, whole.outputs, strict=True):
                self.targets[part] = Target.linear(whole.inputs, outputs)

    def _adapt_experts(
        self, found: Iterable[tuple[str, MoERunner]], names: Mapping[str, Matrix]
    ) -> None:
        for name, runner in found:
            layer = ExpertLayer(name, runner, names)
            adapted = AdaptedExperts(layer, self._source(name), **self._sizes())
            experts: Any = runner.routed_experts.quant_method
            experts.experts.adapters = adapted
            self._adapted(name, adapted, layer.targets())

    def _adapt_heads(self) -> None:
        for name, processor, head in lm_heads(self.model):
            if self._is_wanted(name) and isinstance(processor, RblnLogitsProcessor):
                adapted = AdaptedHead(name, head, self._source(name), **self._sizes())
                processor.adapters = adapted
                self._adapted(name, adapted, adapted.targets())

    def _adapted(self, name: str, layer: Adapted, targets: dict[str, Target]) -> None:
        self.layers[name] = layer
        self.targets |= targets
        self.supported_lora_modules.append(name.rpartition(".")[2])

    def _is_wanted(self, name: str) -> bool:
        return bool(super()._match_target_modules(name))

    def _source(self, name: str) -> RblnPunicaWrapper:
        wrapper = self._get_punica_wrapper(name)
        assert isinstance(wrapper, RblnPunicaWrapper)
        return wrapper

    def _sizes(self) -> dict[str, Any]:
        config = self.lora_config
        return {
            "slots": self.lora_slots,
            "rank": config.max_lora_rank,
            "dtype": config.lora_dtype,
        }


def _of_every_stage(mine: dict[str, Target]) -> dict[str, Target]:
    """Return the targets of all pipeline stages; a collective call of all ranks."""
    stages = groups().get("pp")
    if stages is None:
        return mine
    gathered = [mine] * len(stages.ranks)
    dist.all_gather_object(gathered, mine, group=stages.host_group)
    return {name: target for targets in gathered for name, target in targets.items()}
