"""DeepSpeed's JSON, with what DeepSpeedConfig derives from it.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp

Of the three, one that is missing follows from the others (runtime/config.py, _set_batch_related_parameters).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.formats.configuration.reading import Configuration, Facts, Keys, Reading
from phalanx.spec.errors import InputError

TOP = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "bfloat16",
    "amp",
    "torch_autocast",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "memory_breakdown",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "activation_checkpointing",
    "sparse_attention",
    "eigenvalue",
    "progressive_layer_drop",
    "curriculum_learning",
    "data_efficiency",
    "compression_training",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "elasticity",
    "autotuning",
    "aio",
    "checkpoint",
    "data_types",
    "dataloader_drop_last",
    "hybrid_engine",
    "compile",
    "timers",
    "pipeline",
    "tensor_parallel",
    "sequence_parallel_size",
    "disable_allgather",
    "fp32_allreduce",
    "quantize_training",
    "weight_quantization",
    "monitor_config",
    "nebula",
    "use_data_before_expert_parallelism",
    "graph_harvesting",
    "gradient_allreduce_op",
    "managed_gradient_accumulation",
    "zero_optimization_stage",
    "legacy_fusion",
    "local_rank",
    "world_size",
)
"""Keys of the file that DeepSpeed reads (runtime/config.py and constants.py); any other it drops in silence."""
ZERO = (
    "stage",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "offload_param",
    "offload_optimizer",
    "zenflow",
    "sub_group_size",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "cpu_offload",
    "prefetch_bucket_size",
    "stage3_prefetch_bucket_size",
    "param_persistence_threshold",
    "stage3_param_persistence_threshold",
    "model_persistence_threshold",
    "stage3_model_persistence_threshold",
    "max_live_parameters",
    "stage3_max_live_parameters",
    "max_reuse_distance",
    "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "stage3_gather_fp16_weights_on_model_save",
    "ignore_unused_parameters",
    "legacy_stage1",
    "round_robin_gradients",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
    "mics_shard_size",
    "mics_hierarchical_params_gather",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory",
    "leaf_module",
)
"""Keys of zero_optimization (runtime/zero/config.py, with their aliases)."""
_UNMODELLED = (
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zenflow",
    "sparse_attention",
    "progressive_layer_drop",
    "compression_training",
    "data_efficiency",
    "curriculum_learning",
)


def read(c: Configuration) -> Reading:
    """Read a DeepSpeed configuration. Raises InputError for batches that do not multiply out."""
    k = Keys(_flat(c.settings))
    world = c.world
    tp = k.count("tensor_parallel.autotp_size", least=0) or None
    cp = k.count("sequence_parallel_size")
    pp = k.count("pipeline.stages") if isinstance(c.settings.get("pipeline"), Mapping) else None
    dp = (
        None
        if world is None or world % ((tp or 1) * (cp or 1) * (pp or 1))
        else world // ((tp or 1) * (cp or 1) * (pp or 1))
    )
    batch, micro = k.count("train_batch_size"), k.count("train_micro_batch_size_per_gpu")
    steps = k.count("gradient_accumulation_steps")
    batch, micro, steps = batches(batch, micro, steps, dp)
    zero = k.count("zero_optimization.stage", least=0) or 0
    if zero > 3:
        raise InputError("zero_optimization.stage", zero, "is none of 0 to 3")
    optimizer, param = _device(k, "offload_optimizer"), _device(k, "offload_param")
    if k.flag("zero_optimization.cpu_offload"):
        optimizer = "cpu"
    precision = _precision(k, c.settings)
    shard = k.count("zero_optimization.mics_shard_size", least=-1)
    options: dict[str, Any] = {}
    facts = Facts(
        world=world,
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        zero=zero,
        shard=shard if shard and shard > 0 else None,
        ulysses=cp,
        micro_batch=micro,
        grad_accum=steps,
        global_batch=batch,
        precision=precision,
        optimizer_offload=1.0 if optimizer in ("cpu", "nvme") else 0.0,
        parameter_offload=param in ("cpu", "nvme"),
    )
    k.take("gradient_clipping", "communication_data_type", "data_types.grad_accum_dtype")
    known = {key for key in k.settings if key.split(".")[0] in TOP and key.split(".")[0] != "zero_optimization"}
    known |= {f"zero_optimization.{name}" for name in ZERO} | set(TOP)
    known |= {key for key in k.settings if key.startswith("zero_optimization.") and key.split(".")[1] in ZERO}
    effect = {key for key in k.settings if key.startswith(_UNMODELLED) and not key.endswith("enabled")}
    understood, idle, unknown = k.account(known, effect)
    return Reading(c, "deepspeed", "", facts, options, {}, understood, idle, unknown)


def batches(
    batch: int | None, micro: int | None, steps: int | None, dp: int | None
) -> tuple[int | None, int | None, int | None]:
    """Complete (global batch, micro batch, accumulation) as DeepSpeed does. Raises InputError where they disagree."""
    if dp is None:
        return batch, micro, steps
    if micro is not None and batch is None:
        return micro * (steps or 1) * dp, micro, steps or 1
    if batch is None:
        return batch, micro, steps
    if micro is None and steps is None:
        micro, steps = batch // dp, 1
    elif micro is None:
        micro = batch // dp // (steps or 1)
    elif steps is None:
        steps = batch // micro // dp
    if micro * (steps or 1) * dp != batch:
        reason = f"is not micro batch x accumulation x dp = {micro} x {steps} x {dp}"
        raise InputError("train_batch_size", batch, reason, f"use {micro * max(1, steps or 1) * dp}")
    return batch, micro, steps


def _device(k: Keys, name: str) -> str:
    device = k.take(f"zero_optimization.{name}.device")
    return "none" if device is None else str(device)


def _precision(k: Keys, settings: Mapping[str, Any]) -> str | None:
    switches = {name: k.take(f"{name}.enabled") for name in ("bf16", "bfloat16", "fp16")}
    if switches["bf16"] is True or switches["bfloat16"] is True:
        return "bf16"
    if switches["fp16"] is True:
        return "fp16"
    if "auto" in switches.values() or "amp" in settings or "torch_autocast" in settings:
        return None
    return "fp32"


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
