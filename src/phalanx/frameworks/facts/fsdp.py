"""PyTorch's fully_shard (FSDP2): by hand, and under torchtitan and accelerate.

`reshard_after_forward=True` is zero=3, False is zero=2 (gathered once per micro-batch); DDP is zero=0. Level 1 it has
not. With a pipeline parameters stay gathered over the step.
"""

from __future__ import annotations

from phalanx.frameworks.stack import Facts, Rule, Stack, entries

_FULLY_SHARD = "torch/distributed/fsdp/_fully_shard/_fully_shard.py"
_POLICIES = "torch/distributed/fsdp/_fully_shard/_fsdp_api.py"
_SCHEDULES = "torch/distributed/pipelining/schedules.py"
_CONTEXT = "torch/distributed/tensor/experimental/_context_parallel/_attention.py"

_BY_HAND: Facts = {
    "dp": (None, "init_device_mesh"),
    "zero": ((0, 2, 3), "reshard_after_forward"),
    "shard": (None, "fully_shard(mesh=two axes)", "HSDP: replicas by shards"),
    "tp": (None, "parallelize_module"),
    "sp": (None, "SequenceParallel"),
    "cp": (None, "context_parallel"),
    "ulysses": ((1,), ""),
    "ep": (None, "parallelize_module over an axis of experts"),
    "etp": ((1,), ""),
    "pp": (None, "PipelineStage"),
    "virtual": (None, "several PipelineStages a rank"),
    "schedule": (
        ("gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v"),
        "ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble, ScheduleDualPipeV",
    ),
    "layers": (None, "the modules of each PipelineStage"),
    "micro_batch": (None, "the batch, or n_microbatches"),
    "recompute": (("none", "full", "every:*"), "checkpoint_wrapper of each block, or of every k-th"),
    "compression": (("none",), ""),
    "grad_sync": (("step", "micro"), "set_requires_gradient_sync"),
    "reshard": (("step", "action"), "reshard_after_forward, set_reshard_after_backward"),
    "bucket": ((), "", "a unit's gradients travel together"),
    "prefetch": (None, "set_modules_to_forward_prefetch"),
    "order": (("pp/dp/cp/tp", "dp/pp/cp/tp"), "the order of init_device_mesh's axes"),
}
_BY_HAND_LINES = {
    "dp": "torch/distributed/device_mesh.py:1498",
    "zero": f"{_FULLY_SHARD}:68",
    "shard": f"{_FULLY_SHARD}:67",
    "tp": "torch/distributed/tensor/parallel/api.py:14",
    "sp": "torch/distributed/tensor/parallel/style.py:339",
    "cp": f"{_CONTEXT}:1515",
    "ulysses": f"{_CONTEXT}:1515",
    "ep": "torch/distributed/tensor/parallel/api.py:14",
    "etp": "torch/distributed/tensor/parallel/api.py:14",
    "pp": f"{_SCHEDULES}:995",
    "virtual": f"{_SCHEDULES}:2891",
    "schedule": f"{_SCHEDULES}:872",
    "layers": f"{_SCHEDULES}:995",
    "micro_batch": f"{_SCHEDULES}:995",
    "recompute": "torch/utils/checkpoint.py:355",
    "compression": f"{_POLICIES}:52",
    "grad_sync": f"{_FULLY_SHARD}:413",
    "reshard": f"{_FULLY_SHARD}:490",
    "bucket": f"{_FULLY_SHARD}:64",
    "prefetch": f"{_FULLY_SHARD}:513",
    "order": "torch/distributed/device_mesh.py:1498",
}
_BY_HAND_OPTIONS: Facts = {
    "reduce": (None, "MixedPrecisionPolicy(reduce_dtype=...)"),
    "gradients": (None, "MixedPrecisionPolicy(reduce_dtype=...)", "gradients accumulate in the reduced type"),
    "parameter_offload": (None, "CPUOffloadPolicy()", "parameters, gradients and optimizer state"),
    "optimizer_offload": ((0.0, 1.0), "CPUOffloadPolicy()"),
    "context": (("auto", "p2p", "all_gather"), "set_rotate_method"),
}
_BY_HAND_OPTION_LINES = {
    "reduce": f"{_POLICIES}:52",
    "gradients": f"{_POLICIES}:52",
    "parameter_offload": f"{_POLICIES}:183",
    "optimizer_offload": f"{_POLICIES}:183",
    "context": f"{_CONTEXT}:1515",
}


def offload_rules(source: str) -> tuple[Rule, ...]:
    """fully_shard's CPUOffloadPolicy takes parameters and optimizer state to the host, or neither."""
    return (
        Rule("parameter_offload=1, zero<2", "only shards are offloaded", "use zero=3", source),
        Rule(
            "parameter_offload=1, optimizer_offload=0",
            "parameters go to the host together with the optimizer's state",
            "add optimizer_offload=1",
            source,
        ),
        Rule(
            "optimizer_offload>0, parameter_offload=0",
            "the optimizer's state goes to the host together with parameters",
            "add parameter_offload=1",
            source,
        ),
    )


FSDP2 = Stack(
    name="fsdp2",
    title="PyTorch 2.13 FSDP2 by hand",
    repository="pytorch/pytorch",
    commit="cf30153c4c131c8164ee7798e5022d810682e2cb",
    constants="fsdp2",
    strategy=entries(_BY_HAND, _BY_HAND_LINES),
    options=entries(_BY_HAND_OPTIONS, _BY_HAND_OPTION_LINES),
    rules=(
        *offload_rules(f"{_POLICIES}:183"),
        Rule(
            "zero=2, pp>1",
            "with a pipeline parameters stay gathered at level 3 already",
            "use zero=3",
            "torch/distributed/pipelining/stage.py:845",
        ),
    ),
)

_CONFIGS = "torchtitan/config/configs.py"
_TITAN: Facts = {
    **_BY_HAND,
    "dp": (None, "parallelism.data_parallel_replicate_degree x data_parallel_shard_degree"),
    "zero": ((0, 2, 3), "parallelism.fsdp_reshard_after_forward"),
    "shard": (None, "parallelism.data_parallel_shard_degree"),
    "tp": (None, "parallelism.tensor_parallel_degree"),
    "sp": (None, "parallelism.enable_sequence_parallel"),
    "cp": (None, "parallelism.context_parallel_degree"),
    "ep": (None, "parallelism.expert_parallel_degree"),
    "pp": (None, "parallelism.pipeline_parallel_degree"),
    "virtual": (None, "parallelism.pipeline_parallel_layers_per_stage"),
    "schedule": (
        ("gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v"),
        "parallelism.pipeline_parallel_schedule = GPipe | 1F1B | Interleaved1F1B | ZBVZeroBubble | DualPipeV",
    ),
    "layers": (None, "parallelism.module_fqns_per_model_part"),
    "micro_batch": (
        None,
        "training.local_batch_size",
        "with a pipeline pipeline_parallel_microbatch_size; later num_tokens_per_microbatch_per_dp_rank",
    ),
    "recompute": (
        ("none", "selective", "full"),
        "activation_checkpoint = FullAC.Config | SelectiveAC.Config",
        "selective saves the results of every second product and of attention",
    ),
    "grad_sync": (("step", "micro"), "", "every backward pass reduces, with a pipeline the last of a step"),
    "reshard": (("step", "action"), "", "with a pipeline parameters stay for the step"),
    "prefetch": ((1,), ""),
    "order": (("pp/dp/cp/tp",), ""),
}
_TITAN_LINES = {
    "dp": f"{_CONFIGS}:122",
    "zero": f"{_CONFIGS}:145",
    "shard": f"{_CONFIGS}:133",
    "tp": f"{_CONFIGS}:166",
    "sp": f"{_CONFIGS}:169",
    "cp": f"{_CONFIGS}:239",
    "ulysses": "torchtitan/distributed/context_parallel/api.py:24",
    "ep": f"{_CONFIGS}:282",
    "etp": "torchtitan/distributed/parallel_dims.py:188",
    "pp": f"{_CONFIGS}:180",
    "virtual": f"{_CONFIGS}:209",
    "schedule": f"{_CONFIGS}:216",
    "layers": f"{_CONFIGS}:187",
    "micro_batch": f"{_CONFIGS}:37",
    "recompute": "torchtitan/distributed/activation_checkpoint.py:166",
    "compression": f"{_CONFIGS}:102",
    "grad_sync": "torchtitan/trainer.py:266",
    "reshard": "torchtitan/distributed/fsdp.py:112",
    "bucket": "torchtitan/distributed/fsdp.py:32",
    "prefetch": "torchtitan/distributed/fsdp.py:189",
    "order": "torchtitan/distributed/parallel_dims.py:239",
}
_TITAN_OPTIONS: Facts = {
    "first_stage_layers": (None, "parallelism.pipeline_parallel_first_stage_less_layers"),
    "last_stage_layers": (None, "parallelism.pipeline_parallel_last_stage_less_layers"),
    "embedding_as_layer": (None, "parallelism.pipeline_parallel_first_stage_less_layers = 1"),
    "loss_as_layer": (None, "parallelism.pipeline_parallel_last_stage_less_layers = 1"),
    "products": (
        ("auto", "bfloat16", "float8-block", "float8-mx"),
        "Float8LinearConverter (rowwise), MXFP8LinearConverter",
    ),
    "optimizer": (("auto", "adam", "muon"), "optimizer.name = AdamW | DistMuon"),
    "optimizer_offload": ((0.0, 1.0), "training.enable_cpu_offload"),
    "parameter_offload": (None, "training.enable_cpu_offload"),
    "document": (None, "attention over documents (varlen)"),
    "lora": (None, "LoRAConverter"),
    "lora_targets": (None, "LoRAConverter"),
    "mtp": ((0, 1), "deepseek_v3 with MTP"),
    "cross_entropy": (("auto", "plain", "linear"), "ChunkedLossWrapper", "", True),
    "tp_overlap": (("auto", "none", "async"), "compile.enable_async_tensor_parallel"),
    "dispatch": (
        ("auto", "all_to_all", "deepep", "hybridep"),
        "comm_backend = standard | deepep | hybridep",
        "",
        True,
    ),
}
_TITAN_OPTION_LINES = {
    "first_stage_layers": f"{_CONFIGS}:197",
    "last_stage_layers": f"{_CONFIGS}:203",
    "embedding_as_layer": f"{_CONFIGS}:197",
    "loss_as_layer": f"{_CONFIGS}:203",
    "products": "torchtitan/components/quantization/float8.py:53",
    "optimizer": "torchtitan/components/optimizer/optimizer.py:146",
    "optimizer_offload": f"{_CONFIGS}:70",
    "parameter_offload": f"{_CONFIGS}:70",
    "document": "torchtitan/models/common/attention.py:576",
    "lora": "torchtitan/components/lora.py:141",
    "lora_targets": "torchtitan/components/lora.py:141",
    "mtp": "torchtitan/models/deepseek_v3/config_registry.py:22",
    "cross_entropy": "torchtitan/components/loss.py:501",
    "tp_overlap": f"{_CONFIGS}:298",
    "dispatch": "torchtitan/models/common/config_utils.py:364",
}
TORCHTITAN = Stack(
    name="torchtitan",
    title="torchtitan 0.3",
    repository="pytorch/torchtitan",
    commit="b5bcd76c66d0acb1a08b176d9639425bc55e0b2a",
    constants="torchtitan-2025-06",
    strategy=entries(_TITAN, _TITAN_LINES),
    options=entries(_TITAN_OPTIONS, _TITAN_OPTION_LINES),
    rules=(
        *offload_rules(f"{_CONFIGS}:70"),
        Rule(
            "cp>1, zero=0",
            "fully_shard runs over dp_shard x cp, so ranks of cp always shard",
            "use zero=3",
            "torchtitan/distributed/parallel_dims.py:645",
        ),
        Rule(
            "zero=2, pp>1",
            "with a pipeline parameters stay gathered at level 3 already",
            "use zero=3",
            "torchtitan/distributed/fsdp.py:127",
        ),
        Rule(
            "schedule in (gpipe, 1f1b), virtual>1",
            "single-stage schedules have one stage a rank",
            "use schedule=interleaved, or virtual=1",
            "torchtitan/distributed/pipeline_parallel.py:246",
        ),
        Rule(
            "tp_overlap=async, tp=1",
            "there is no collective of tensor parallelism to overlap",
            "use tp=2 or more",
            f"{_CONFIGS}:311",
        ),
    ),
)

_PARALLELISM = "src/accelerate/parallelism_config.py"
_PLUGINS = "src/accelerate/utils/dataclasses.py"
_ACCELERATE: Facts = {
    **_BY_HAND,
    "dp": (None, "parallelism_config_dp_replicate_size x parallelism_config_dp_shard_size"),
    "zero": ((0, 2, 3), "fsdp_reshard_after_forward"),
    "shard": (None, "parallelism_config_dp_shard_size"),
    "tp": (None, "parallelism_config_tp_size"),
    "sp": ((False,), ""),
    "cp": (None, "parallelism_config_cp_size"),
    "ulysses": ((1,), "", "sp_size is DeepSpeed's, in place of FSDP2"),
    "ep": ((1,), ""),
    "pp": ((1,), ""),
    "virtual": ((1,), ""),
    "schedule": ((), ""),
    "layers": (("auto",), ""),
    "micro_batch": (None, "per_device_train_batch_size of the script; gradient_accumulation_steps"),
    "recompute": (("none", "full"), "fsdp_activation_checkpointing"),
    "grad_sync": (("step", "micro"), "gradient_accumulation_plugin.sync_each_batch"),
    "reshard": ((), ""),
    "prefetch": ((1,), ""),
    "order": (("pp/dp/cp/tp",), ""),
}
_ACCELERATE_LINES = {
    "dp": f"{_PARALLELISM}:70",
    "zero": f"{_PLUGINS}:1673",
    "shard": f"{_PARALLELISM}:71",
    "tp": f"{_PARALLELISM}:72",
    "sp": f"{_PARALLELISM}:75",
    "cp": f"{_PARALLELISM}:73",
    "ulysses": f"{_PARALLELISM}:328",
    "ep": f"{_PARALLELISM}:34",
    "etp": f"{_PARALLELISM}:34",
    "pp": f"{_PARALLELISM}:267",
    "virtual": f"{_PARALLELISM}:267",
    "schedule": f"{_PARALLELISM}:267",
    "layers": f"{_PARALLELISM}:267",
    "micro_batch": f"{_PLUGINS}:984",
    "recompute": f"{_PLUGINS}:1787",
    "compression": f"{_PLUGINS}:1604",
    "grad_sync": f"{_PLUGINS}:994",
    "reshard": f"{_PLUGINS}:1673",
    "bucket": f"{_PLUGINS}:1673",
    "prefetch": f"{_PLUGINS}:1601",
    "order": f"{_PARALLELISM}:267",
}
_ACCELERATE_OPTIONS: Facts = {
    "optimizer_offload": ((0.0, 1.0), "fsdp_offload_params"),
    "parameter_offload": (None, "fsdp_offload_params"),
    "context": (("auto", "all_gather"), "parallelism_config_cp_comm_strategy"),
    "reduce": (None, "mixed_precision_policy.reduce_dtype"),
}
_ACCELERATE_OPTION_LINES = {
    "optimizer_offload": f"{_PLUGINS}:1709",
    "parameter_offload": f"{_PLUGINS}:1709",
    "context": f"{_PLUGINS}:2213",
    "reduce": f"{_PLUGINS}:1604",
}
ACCELERATE = Stack(
    name="accelerate",
    title="accelerate 1.15 (FSDP2, parallelism_config)",
    repository="huggingface/accelerate",
    commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    constants="accelerate",
    strategy=entries(_ACCELERATE, _ACCELERATE_LINES),
    options=entries(_ACCELERATE_OPTIONS, _ACCELERATE_OPTION_LINES),
    rules=(
        *offload_rules(f"{_PLUGINS}:1709"),
        *(
            Rule(
                f"{axis}>1, dp>1, zero=0",
                "replicas of tensor- or context-parallel models must be sharded",
                "use zero=3",
                f"{_PARALLELISM}:336",
            )
            for axis in ("tp", "cp")
        ),
        *(
            Rule(
                f"{axis}>1, dp>1, dp_shard=1",
                "replicas of tensor- or context-parallel models must be sharded",
                "use a shard of 2 or more",
                f"{_PARALLELISM}:336",
            )
            for axis in ("tp", "cp")
        ),
    ),
)
