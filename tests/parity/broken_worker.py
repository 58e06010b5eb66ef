"""A worker with a wrong attention scale in one layer, as a faulty kernel would give."""

from vllm.v1.kv_cache_interface import KVCacheConfig

from rbln_backend.parity.probe_worker import ProbeWorker
from rbln_backend.worker.preflight import attention_layers

BROKEN_LAYER = "model.layers.1"


class BrokenWorker(ProbeWorker):
    """Multiply the layer's scores by 1.5."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        layer = attention_layers(self.vllm_config)[f"{BROKEN_LAYER}.self_attn.attn"]
        layer.impl.scale_tensor.mul_(1.5)
