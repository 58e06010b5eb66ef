"""The report of `rbln-serve check` on a model: layers, graphs, memory and stored graphs."""

from __future__ import annotations

from rbln_backend.core import Phase
from rbln_backend.reporting.model_report import ModelReport
from rbln_backend.speculation.choice import draft_model_of
from rbln_backend.vllm_compat.surface import VllmConfig
from rbln_backend.worker.check.memory_plan import memory_report
from rbln_backend.worker.check.store_survey import knows_ranks, survey
from rbln_backend.worker.startup.model_layers import quantized_summary
from rbln_backend.worker.startup.preflight import (
    cache_groups,
    generates,
    prefix_caching,
    prepare,
    sampler_graphs,
)


def inspect_model(config: VllmConfig) -> ModelReport:
    """Return the report on a model, its memory and its stored graphs; raises like ``prepare``."""
    found = prepare(config)
    model, tables = config.model_config, found.tables
    caching, reason = prefix_caching(config, found.rbln, found.specs)
    lora = config.lora_config
    follows = model.original_max_model_len != -1
    return ModelReport(
        architecture=model.architecture,
        task="generates text" if generates(config) else "pools",
        device=found.capabilities.device,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        quantized_layers=quantized_summary(found.skeleton.model),
        num_parameters=found.skeleton.num_parameters,
        weight_bytes=found.skeleton.weight_bytes,
        kv_groups=cache_groups(found.specs),
        max_model_len=model.max_model_len,
        block_size=config.cache_config.block_size,
        prefill_chunks=next(iter(tables.values())).sizes,
        decode_buckets=tables[Phase.DECODE].sizes if Phase.DECODE in tables else (),
        num_graphs=len(found.graphs),
        num_sampler_graphs=len(sampler_graphs(config, found.graphs)),
        prefix_caching=caching,
        prefix_caching_reason=reason,
        verify_sizes=tuple(f"{requests}x{tokens}" for requests, tokens in found.verify),
        draft_model=_draft_model(config),
        max_loras=lora.max_loras if lora else 0,
        max_lora_rank=lora.max_lora_rank if lora else 0,
        lacking=found.lacking,
        memory=memory_report(found),
        # With --max-model-len auto the graphs depend on the memory of the serving host.
        store=survey(found) if follows and knows_ranks(config) else None,
    )


def _draft_model(config: VllmConfig) -> str:
    """Return the method and the name of the draft model; empty without one."""
    speculation = draft_model_of(config)
    if speculation is None:
        return ""
    return f"{speculation.method}, {speculation.draft_model_config.model}"
