"""What happens to each argument of vLLM's `LLM(...)` and `EngineArgs` (0.33, and older names)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagedjax.options.vllm_names.rows import by_name, no_effect, read, refusal, translation

DTYPES = {"auto": None, "half": "float16", "float": "float32"}
CACHE_DTYPES = {"auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
INT8 = ("int8", "int8_per_channel_weight_only")
# methods whose checkpoints are kept in their own bits
AS_STORED = (
    "gguf",
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "compressed-tensors",
    "fp8",
    "mxfp4",
)
MAX_LOGPROBS = 20


def _as(option: str):
    """The function `becomes` of an argument that is an option under another name."""
    return lambda _, value: {} if value is None else {option: value}


def _dtype(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {name: None}
    dtype = str(value).removeprefix("torch.")  # a script may give torch's own
    return {name: DTYPES.get(dtype, dtype)}


def _cache_dtype(name: str, value: Any) -> Mapping[str, Any]:
    return {name: CACHE_DTYPES.get(value, value) if isinstance(value, str) else value}


def _quantization(_: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if value in INT8:
        return {"weight_dtype": "int8"}
    if value in AS_STORED:
        return {"weight_dtype": "stored"}
    raise ValueError(
        f"use one of {', '.join(map(repr, AS_STORED))} for the own bits of a checkpoint that is "
        "quantized so, 'int8' to round weights to 8 bits when they are loaded, or leave it out"
    )


def _mesh(_: str, value: Any) -> Mapping[str, Any]:
    return {} if value in (None, 1) else {"mesh": {"tensor": value}}


def _swap_space(_: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not value:
        return {"swap_space_gib": value}
    return {"swap_space_gib": value, "preemption": "swap"}


def _lookahead(_: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, bool):
        raise ValueError("it must be True or False")
    return {} if value is None else {"lookahead": int(value)}


def _keep_window_blocks(_: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, bool):
        raise ValueError("it must be True or False")
    return {} if value is None else {"free_window_blocks": not value}


def _prefix_checkpoints(_: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("it must be an integer of at least 0, or None")
    return {"prefix_checkpoints": {"interval": value, "prompts": True, "junctions": True}}


def _devices(_: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    return {"devices": tuple(value) if isinstance(value, (list, tuple)) else value}


def _max_logprobs(_: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not (isinstance(value, int) and 0 <= value <= MAX_LOGPROBS):
        raise ValueError(
            f"a step ranks the {MAX_LOGPROBS} most likely tokens at most, and never the whole "
            f"vocabulary; give at most {MAX_LOGPROBS}"
        )
    return {}


HUB = {  # argument of vLLM -> argument of `huggingface_hub.snapshot_download`
    "revision": "revision",
    "hf_token": "token",
    "download_dir": "cache_dir",
}

TABLE = (
    # arguments with a meaning here
    translation(
        "model tokenizer seed max_model_len max_num_batched_tokens max_num_seqs", "the same"
    ),
    translation("block_size enable_prefix_caching", "the same"),
    translation("dtype", "the same; `auto` is float32 on a CPU and bfloat16 elsewhere", _dtype),
    translation(
        "kv_cache_dtype",
        "`auto` is `dtype`; `fp8` and `fp8_e4m3` are `float8_e4m3fn`",
        _cache_dtype,
    ),
    translation(
        "quantization",
        "`int8`, `int8_per_channel_weight_only`: `weight_dtype`; `gguf`, `awq`, `gptq`, "
        "`compressed-tensors`, `fp8`, `mxfp4`: its `stored`; others: an error",
        _quantization,
    ),
    translation("tensor_parallel_size", '`mesh={"tensor": n}`', _mesh),
    translation(
        "enable_expert_parallel", '`mesh={"expert": n}` of `tensor_parallel_size` n', _as("experts")
    ),
    translation("device_ids", "`devices`", _devices),
    translation(
        "gpu_memory_utilization",
        "`memory_fraction`: a share of what is free after the weights",
        _as("memory_fraction"),
    ),
    translation("num_gpu_blocks_override", "`num_blocks`", _as("num_blocks")),
    translation("swap_space", '`swap_space_gib`, with `preemption="swap"` above 0', _swap_space),
    translation("enable_chunked_prefill", "`chunked_prefill`", _as("chunked_prefill")),
    translation("scheduling_policy", "`policy`", _as("policy")),
    translation(
        "disable_hybrid_kv_cache_manager", "`free_window_blocks=False`", _keep_window_blocks
    ),
    translation(
        "prefix_cache_retention_interval",
        "`prefix_checkpoints`: an `interval`, `prompts` and `junctions`",
        _prefix_checkpoints,
    ),
    translation("async_scheduling", "`lookahead` of 1 or 0; 0 with speculation", _lookahead),
    translation(
        "speculative_config", "`speculative`, also under vLLM's names of fields", _as("speculative")
    ),
    translation(
        "logits_processors",
        "`row_features`: a `RowFeature` or its `folder/file.py:NAME` "
        "([how](logits-processors.md)); classes: an error",
        _as("row_features"),
    ),
    translation("enable_lora max_loras max_lora_rank", "the same ([adapters](adapters.md))"),
    translation("max_logprobs", f"up to {MAX_LOGPROBS}, which is always allowed", _max_logprobs),
    translation("revision hf_token download_dir", "of a model from the hub"),
    translation("use_tqdm_on_load", "`progress`"),
    # arguments that change nothing here
    no_effect(
        "enforce_eager compilation_config optimization_level performance_mode "
        "cudagraph_capture_sizes monokernel max_cudagraph_capture_size max_seq_len_to_capture "
        "cuda_graph_sizes enable_flashinfer_autotune",
        "XLA compiles every program; see `compilation`",
    ),
    no_effect(
        "attention_config kernel_config ir_op_priority moe_backend linear_backend "
        "sparse_indexer_topk_backend all2all_backend disable_cascade_attn use_fp64_gumbel",
        "kernels are chosen by `attention_impl` and `linear_impl`",
    ),
    no_effect(
        "disable_custom_all_reduce distributed_executor_backend ray_workers_use_nsight "
        "max_parallel_loading_workers distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "enable_nccl_comm_suspend numa_bind numa_bind_nodes numa_bind_cpus worker_cls "
        "worker_extension_cls worker_use_ray enable_shm_tensor_arena "
        "disable_nccl_for_dp_synchronization enable_batch_sharded_sampling "
        "enable_ep_weight_filter dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size master_addr master_port node_rank data_parallel_rank "
        "data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb enable_hc_sp "
        "fault_tolerance_config enable_fault_tolerance watchdog_config _api_process_count "
        "_api_process_rank",
        "one process has all devices of its host, and XLA exchanges their data",
    ),
    no_effect(
        "trust_remote_code code_revision model_impl config_format safetensors_load_strategy "
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size ignore_patterns "
        "model_loader_extra_config pt_load_map_location tokenizer_mode tokenizer_pool_size "
        "tokenizer_pool_type tokenizer_pool_extra_config allow_deprecated_quantization",
        "safetensors, Orbax and .gguf files are read by this project's code, with tokenizer.json",
    ),
    no_effect("skip_tokenizer_init", "a model with a tokenizer loads it; prompts may be token ids"),
    no_effect(
        "disable_log_stats disable_log_requests aggregate_engine_logging "
        "enable_logging_iteration_details logging_config log_level log_config_file "
        "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample "
        "custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing "
        "enable_mfu_metrics jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats",
        "an engine logs nothing; see `engine.record` and a server's /metrics",
    ),
    no_effect("profiler_config", "`LLM.start_profile(folder)` needs no configuration"),
    no_effect(
        "generation_config override_generation_config",
        "without `SamplingParams` a request has their defaults, and not those of "
        "generation_config.json",
        "vllm",
        warns=True,
    ),
    no_effect(
        "task runner convert served_model_name",
        "an engine serves all that its model can do, under any name",
    ),
    no_effect(
        "structured_outputs_config guided_decoding_backend guided_decoding_disable_fallback "
        "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties "
        "logits_processor_pattern",
        "the backend of structured outputs is this project's own",
    ),
    no_effect(
        "enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph enable_cumem_allocator "
        "sleep_preserve_parameter_names",
        "`LLM.sleep` is always there",
    ),
    no_effect("enable_trace_replay", "every engine takes trace_decode_token_ids"),
    no_effect(
        "prefix_caching_hash_algo prefix_match_unit use_v2_block_manager "
        "num_lookahead_slots watermark scheduler_reserve_full_isl "
        "prefill_schedule_interval long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive max_num_partial_prefills max_long_partial_prefills "
        "preemption_mode scheduler_delay_factor num_scheduler_steps multi_step_stream_outputs "
        "disable_async_output_proc stream_interval swa_bounded_replay kv_sharing_fast_prefill "
        "disable_chunked_mm_input max_num_scheduled_tokens max_num_active_seqs",
        "the scheduler has its own rules (scheduler.md)",
    ),
    no_effect(
        "max_num_queued_reqs max_num_queued_tokens tokens_only shutdown_timeout "
        "fail_on_environ_validation renderer_num_workers io_processor_plugin "
        "reasoning_parser_plugin",
        "options of a server, which has its own",
    ),
    no_effect(
        "eplb_config expert_placement_strategy elastic_ep_max_dp_size ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold dp_sync_interval offload_backend "
        "cpu_offload_params offload_num_in_group offload_prefetch_step offload_params "
        "kv_offloading_backend enable_mixed_moe_lora_format enable_moe_shared_loras "
        "enable_tower_connector_lora max_lora_cls_labels aux_output_config ec_manager_config "
        "max_prompt_adapters max_prompt_adapter_token",
        "details of an option that is refused when it is on",
    ),
    no_effect(
        "max_cpu_loras lora_dtype fully_sharded_loras specialize_active_lora "
        "lora_extra_vocab_size long_lora_scaling_factors",
        "adapters are on one device, in the dtype of activations; one that gave way is read again",
    ),
    no_effect(
        "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode "
        "mamba_backend mamba_ssu_algorithm enable_mamba_shared_prefix_checkpoint "
        "replayssm_buffer_len use_replayssm enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds gdn_prefill_backend kda_prefill_backend kda_decode_backend",
        "a state has one layout here, and `prefix_checkpoints` says which ones are kept",
    ),
    no_effect(
        "allowed_local_media_path allowed_media_domains limit_mm_per_prompt language_model_only "
        "media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling "
        "video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device "
        "mm_ipc_gpu_memory_gb mm_device_do_normalize interleave_mm_strings "
        "disable_mm_preprocessor_cache",
        "models here take text alone",
    ),
    # arguments that are refused, unless they ask for nothing
    refusal(
        "pipeline_parallel_size", "there are no stages of a pipeline; use tensor_parallel_size", 1
    ),
    refusal(
        "data_parallel_size",
        "an engine has one cache and one queue; start an engine for each slice, with devices",
        1,
    ),
    refusal(
        "prefill_context_parallel_size decode_context_parallel_size",
        "no context is split over devices; use tensor_parallel_size",
        1,
    ),
    refusal(
        "nnodes",
        "start the same command in each process (processes.md), with tensor_parallel_size",
        1,
    ),
    refusal("enable_elastic_ep enable_eplb enable_dbo", "experts are dealt once; leave it out"),
    refusal(
        "cpu_offload_gb offload_group_size",
        "weights stay on the devices; use quantization='int8' or more devices",
    ),
    refusal(
        "kv_offloading_size",
        "blocks that finished requests leave stay on the device; use swap_space",
    ),
    refusal(
        "kv_cache_memory_bytes",
        "the size of the cache is a number of blocks; use num_gpu_blocks_override",
    ),
    refusal(
        "kv_cache_dtype_skip_layers calculate_kv_scales",
        "all layers keep one dtype; use kv_cache_dtype",
    ),
    refusal(
        "kv_transfer_config kv_events_config ec_transfer_config",
        "engines share no cache; leave it out",
    ),
    refusal(
        "enable_lora_bias default_mm_loras",
        "adapters have factors alone; merge them into the weights",
    ),
    refusal(
        "lora_target_modules",
        "an adapter is served with all of its modules; train it without the others",
    ),
    refusal(
        "enable_prompt_adapter enable_prompt_embeds enable_mm_embeds",
        "a prompt is text or token ids; give these",
    ),
    refusal("mm_encoder_only", "models here take text alone; leave it out"),
    refusal(
        "hf_overrides hf_config_path model_class_overrides rope_scaling rope_theta",
        "give LLM(params=..., config=...) instead",
    ),
    refusal("quantization_config", "weights are rounded by one rule; use quantization='int8'"),
    refusal(
        "load_format",
        "a model's form is known by its files; leave it out",
        "auto",
        "hf",
        "safetensors",
        "gguf",
    ),
    refusal("model_weights", "a model is one folder, file or name; give it as model"),
    refusal("tokenizer_revision", "load the tokenizer's folder yourself and give it as tokenizer"),
    refusal(
        "chat_template",
        "a model's own template is used; change tokenizer_config.json or chat_template.jinja",
    ),
    refusal(
        "logprobs_mode",
        "log-probabilities are the model's own, before any option: 'raw_logprobs'",
        "raw_logprobs",
    ),
    refusal("attention_backend", "use attention_impl, or leave it out"),
    refusal("scheduler_cls", "write a Policy and give it as policy"),
    refusal(
        "disable_sliding_window",
        "a model's window is a part of it; lower max_model_len to the window",
    ),
    refusal("spec_method spec_model spec_tokens", "use speculative_config={'method': ..., ...}"),
    refusal(
        "speculative_model num_speculative_tokens",
        "use speculative_config={'method': 'draft_model', ...}",
    ),
    refusal(
        "pooler_config override_pooler_config", "an engine has no pooler of a user; leave it out"
    ),
    refusal(
        "reasoning_parser reasoning_config",
        "text is returned as it was generated; split it yourself",
    ),
    refusal("watermark_config", "write it as logits_processors; logits-processors.md has one"),
    refusal("diffusion_config engram_config", "no model here has it; leave it out"),
    refusal("weight_transfer_config", "use LLM.update_params"),
    refusal("enable_return_routed_experts", "use SamplingParams(taps=Taps(experts=...))"),
    refusal("return_sampling_mask", "no output has it; leave it out"),
    refusal("additional_config", "there are no plugins; give each option by its name"),
    refusal("device", "JAX chooses the platform; set JAX_PLATFORMS", "auto"),
)
ARGUMENTS = by_name(TABLE)


class EngineArguments(NamedTuple):
    """The arguments of `LLM(...)`, by who takes them.

    engine: fields of `EngineConfig`, and unknown names.
    hub: how a model is fetched: arguments of `huggingface_hub.snapshot_download`.
    progress: whether progress may be shown.
    """

    engine: dict[str, Any]
    hub: dict[str, Any]
    progress: bool


def engine_arguments(arguments: Mapping[str, Any]) -> EngineArguments:
    """The arguments of `LLM(...)` under this project's names.

    Raises:
        ValueError: an argument or a value that cannot be served; names it, and the alternative.
    """
    options = read(arguments, ARGUMENTS)
    hub = {option: options.pop(name) for name, option in HUB.items() if name in options}
    progress = options.pop("use_tqdm_on_load", True) is not False
    if options.pop("experts", False) and "tensor_parallel_size" in arguments and "mesh" in options:
        options["mesh"] = {"expert": arguments["tensor_parallel_size"]}
    if "async_scheduling" in arguments and options.get("speculative"):
        options.pop("lookahead", None)  # a draft follows known tokens; vLLM's scheduler allows both
    return EngineArguments(options, hub, progress)
