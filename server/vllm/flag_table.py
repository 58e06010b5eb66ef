"""Every flag of `vllm serve`: with vLLM's meaning, checked by the engine, translated or refused.

Imports nothing of vLLM, so that the documents are generated without it. With the settings of this
server, every flag of vLLM's parser is in one list (tests/server/vllm/test_patches.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _by_flag(flags_by_text: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each flag."""
    return {flag: text for text, flags in flags_by_text.items() for flag in flags.split()}


_STATES = "models with states (Mamba and others) are not supported; drop it"
_OFFLOAD = "weights stay in memory; use --tensor-parallel-size or a quantized checkpoint"
_CONTEXT = "there is no context parallelism; use --tensor-parallel-size"
_SUPERVISOR = "there is no supervisor of servers; use one server per host behind a load balancer"
_PLUGINS = "install the plugin in vLLM's entry point group vllm.general_plugins"
_SLEEP = "weights stay loaded; /admin/drain takes the server out of service"
_ENCODERS = "models take no media; serve the text with --language-model-only"
_CORES = "the process's affinity chooses the cores; use taskset or the container's CPU set"
REFUSED_FLAGS: Mapping[str, str] = _by_flag(
    {
        "this server does not offer it": "grpc data_parallel_multi_port_external_lb middleware "
        "enable_offline_docs enable_scale_out tokens_only enable_fault_tolerance "
        "cohere_is_reasoning_model cohere_format default_mm_loras watermark_config",
        "prompts are texts or token ids": "enable_prompt_embeds",
        "--max-header-bytes bounds the headers": "h11_max_header_count",
        "--log-format and --log-level set the logs": "log_config_file",
        "tools are those of the client": "tool_server",
        _PLUGINS: "tool_parser_plugin reasoning_parser_plugin",
        _SUPERVISOR: "data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold",
        "it chooses kernels of GPUs; drop it": "attention_backend attention_config kernel_config "
        "ir_op_priority gdn_prefill_backend kda_prefill_backend kda_decode_backend "
        "enable_flashinfer_autotune moe_backend linear_backend sparse_indexer_topk_backend "
        "use_fp64_gumbel performance_mode enable_batch_sharded_sampling kv_sharing_fast_prefill "
        "jit_monitor_mode jit_monitor_verbose enable_layerwise_nvtx_tracing "
        "ray_workers_use_nsight cudagraph_metrics",
        _STATES: "mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size "
        "mamba_cache_mode enable_mamba_fine_grained_prefix_cache replayssm_buffer_len "
        "use_replayssm",
        _OFFLOAD: "offload_backend cpu_offload_gb cpu_offload_params offload_group_size "
        "offload_num_in_group offload_prefetch_step offload_params",
        _CONTEXT: "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size",
        "experts stay on the ranks that loaded them; drop it": "enable_eplb eplb_config "
        "expert_placement_strategy enable_elastic_ep elastic_ep_max_dp_size",
        "graphs take a whole batch; drop it": "dbo_decode_token_threshold "
        "dbo_prefill_token_threshold",
        _CORES: "numa_bind numa_bind_nodes numa_bind_cpus",
        _SLEEP: "enable_sleep_mode enable_cumem_allocator enable_nccl_comm_suspend",
        _ENCODERS: "enable_mm_embeds mm_encoder_only enable_tower_connector_lora "
        "ec_transfer_config ec_manager_config diffusion_config engram_config",
        "answers do not have these; drop it": "enable_return_routed_experts return_sampling_mask "
        "enable_trace_replay",
        "a rank that ends ends the engine, which is started again": "fault_tolerance_config",
        "weights are loaded at start": "weight_transfer_config",
        "RBLN_PROFILER=1 and /start_profile write profiles": "profiler_config",
    }
)
"""vLLM flags that would be accepted and then ignored, with the reason that is given."""

RENAMED_FLAGS: Mapping[str, str] = {
    "shutdown_timeout": "drain_timeout_s",
    "h11_max_incomplete_event_size": "max_header_bytes",
}
"""vLLM flags that are settings of this server, with its names."""

FULFILLED_FLAGS: Mapping[str, str] = _by_flag(
    {
        "finished requests are not logged": "disable_uvicorn_access_log",
        "finished requests of these routes are not logged": "disable_access_log_for_endpoints",
        "`/load` is always there": "enable_server_load_tracking",
        "every answer has X-Request-Id": "enable_request_id_headers",
        "there are no such pages; `/openapi.json` needs an API key, if any": "disable_fastapi_docs",
        "there is no cascade attention": "disable_cascade_attn",
        "ranks never have it": "disable_custom_all_reduce",
        "ranks never use NCCL": "disable_nccl_for_dp_synchronization",
        "each rank loads its own part of the weights": "max_parallel_loading_workers",
        "one graph serves every number of adapters": "specialize_active_lora",
        "no effect: models take no media": "allowed_local_media_path allowed_media_domains "
        "limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb "
        "mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb "
        "mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling "
        "video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device "
        "mm_ipc_gpu_memory_gb mm_device_do_normalize disable_chunked_mm_input",
        "level of the HTTP server's own messages; unset, `warning`": "uvicorn_log_level",
    }
)
"""vLLM flags that are accepted, with what they lead to."""

HONOURED_FLAGS: Mapping[str, Sequence[str]] = {
    subject: flags.split()
    for subject, flags in {
        "Command line and logs": "config disable_log_stats aggregate_engine_logging "
        "fail_on_environ_validation enable_log_requests max_log_len enable_log_outputs "
        "enable_log_deltas log_error_stack",
        "Chats, tools and answers": "chat_template chat_template_content_format "
        "trust_request_chat_template default_chat_template_kwargs response_role "
        "return_tokens_as_token_ids enable_auto_tool_choice exclude_tools_when_tool_choice_none "
        "tool_call_parser enable_prompt_tokens_details enable_per_request_metrics "
        "enable_force_include_usage sse_keep_alive_interval enable_tokenizer_info_endpoint "
        "fingerprint_mode fingerprint_value enable_flash_late_interaction reasoning_parser "
        "reasoning_config",
        "Model and weights": "model runner convert tokenizer tokenizer_mode trust_remote_code "
        "dtype seed hf_config_path revision code_revision tokenizer_revision max_model_len "
        "allow_deprecated_quantization max_logprobs logprobs_mode disable_sliding_window "
        "skip_tokenizer_init served_model_name config_format hf_token hf_overrides "
        "model_class_overrides pooler_config generation_config override_generation_config "
        "model_impl logits_processors io_processor_plugin renderer_num_workers load_format "
        "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size model_loader_extra_config ignore_patterns "
        "use_tqdm_on_load pt_load_map_location language_model_only",
        "Ranks": "pipeline_parallel_size tensor_parallel_size master_addr master_port "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds data_parallel_size "
        "data_parallel_rank data_parallel_address data_parallel_rpc_port dp_sync_interval "
        "enable_expert_parallel enable_ep_weight_filter worker_cls worker_extension_cls",
        "Cache and scheduler": "block_size gpu_memory_utilization kv_cache_memory_bytes "
        "num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo "
        "prefix_cache_retention_interval prefix_match_unit kv_offloading_size "
        "kv_offloading_backend kv_events_config max_num_batched_tokens max_num_scheduled_tokens "
        "max_num_seqs max_num_queued_reqs max_num_queued_tokens long_prefill_token_threshold "
        "scheduling_policy scheduler_cls scheduler_reserve_full_isl watermark "
        "prefill_schedule_interval disable_hybrid_kv_cache_manager stream_interval",
        "Adapters, drafts and the backend": "enable_lora lora_modules max_loras max_lora_rank "
        "spec_method spec_model spec_tokens additional_config",
        "Metrics and traces": "show_hidden_metrics_for_version otlp_traces_endpoint "
        "collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics "
        "kv_cache_metrics_sample enable_mfu_metrics enable_logging_iteration_details",
    }.items()
}
"""Flags with the meaning that they have in vLLM, by subject."""

CHECKED_FLAGS: Mapping[str, str] = {
    "enforce_eager": "refused: every graph is compiled",
    "async_scheduling": "off unless given; not with pipeline stages or drafts "
    "([engine](dev/engine.md#asynchronous-scheduling))",
    "enable_chunked_prefill": "on; `--no-enable-chunked-prefill` is refused",
    "quantization": "the formats of [quantization.md](quantization.md)",
    "quantization_config": "the formats of [quantization.md](quantization.md)",
    "kv_cache_dtype": "`auto`, the model's dtype, e4m3, or on an NPU e5m2",
    "kv_cache_dtype_skip_layers": "refused: all layers have one dtype",
    "distributed_executor_backend": "`uni`, `mp` or `ray`",
    "device_ids": "on an NPU, one for each rank",
    **dict.fromkeys(
        ("nnodes", "node_rank"), "one host; use `--distributed-executor-backend ray` for several"
    ),
    **dict.fromkeys(
        ("data_parallel_start_rank", "data_parallel_size_local"),
        "engines on other hosts are those of `--headless` servers "
        "([parallelism](parallelism.md#engines-on-other-hosts))",
    ),
    **dict.fromkeys(
        ("data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
        "`mp`, one API for all engines; else use one server per host behind a load balancer",
    ),
    "api_server_count": "1; use replicas behind a load balancer for more",
    **dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size"),
        "1; use `--tensor-parallel-size`",
    ),
    "all2all_backend": "`allgather_reducescatter`",
    **dict.fromkeys(("enable_dbo", "ubatch_size"), "refused: graphs take a whole batch"),
    "lora_dtype": "the model's dtype",
    "max_cpu_loras": "of an offline `LLM`; a server has adapters in slots alone",
    "fully_sharded_loras": "refused: ranks split an adapter as they split the layer",
    "lora_target_modules": "attention, MLPs, experts and LM heads",
    **dict.fromkeys(
        ("enable_moe_shared_loras", "enable_mixed_moe_lora_format"),
        "refused: adapters of experts have one format",
    ),
    "speculative_config": "the methods of [speculation.md](speculation.md)",
    "kv_transfer_config": "see [kv_tiers.md](kv_tiers.md) and [kv_transfer.md](kv_transfer.md)",
    "structured_outputs_config": "the backend `auto` ([structured outputs](structured_outputs.md))",
    "compilation_config": "mode 3; `compile_sizes` become decode sizes",
    "cudagraph_capture_sizes": "refused: there are no CUDA graphs",
    "max_cudagraph_capture_size": "no effect, with a warning",
    "optimization_level": "1, 2 or 3, which are the same; 0 is refused",
}
"""Flags of which some values are refused when the engine's configuration is made."""
