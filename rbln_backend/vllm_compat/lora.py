"""vLLM's LoRA, which only engines with adapters import."""

from __future__ import annotations

from torch import nn
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.punica_wrapper import PunicaWrapperBase
from vllm.lora.request import LoRARequest
from vllm.lora.utils import (
    is_base_embedding_weights,
    is_in_target_modules,
    parse_fine_tuned_lora_name,
)
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models import supports_lora
from vllm.model_executor.utils import get_moe_expert_mapping
from vllm.utils.cache import LRUCache


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
