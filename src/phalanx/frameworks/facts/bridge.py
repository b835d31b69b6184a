"""Megatron-Bridge 0.6, the successor of NeMo's training recipes: Megatron-Core under a configuration in Python.

What it trains with is the Megatron-Core that it pins as 3rdparty/Megatron-LM (cd4afff); lines under that folder are
lines there.
"""

from __future__ import annotations

from phalanx.frameworks.facts.megatron import MODULES, OPTIONS, STRATEGY, narrow_parameters, rules
from phalanx.frameworks.stack import Facts, Stack, entries

_PINNED = "3rdparty/Megatron-LM/"
_CONFIG = "src/megatron/bridge/training/config.py"
_WRITTEN = {
    "dp": "world size / (tp x pp x cp)",
    "zero": "ddp.use_distributed_optimizer",
    "shard": "ddp.num_distributed_optimizer_instances = DP/SHARD",
    "tp": "model.tensor_model_parallel_size",
    "sp": "model.sequence_parallel",
    "cp": "model.context_parallel_size",
    "ulysses": "model.cp_comm_type = a2a | a2a+p2p, model.hierarchical_context_parallel_sizes",
    "ep": "model.expert_model_parallel_size",
    "etp": "model.expert_tensor_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "virtual": "model.virtual_pipeline_model_parallel_size",
    "schedule": "",
    "layers": "model.pipeline_model_parallel_layout",
    "micro_batch": "train.micro_batch_size",
    "recompute": "model.recompute_granularity, recompute_method, recompute_num_layers, recompute_modules",
    "compression": "",
    "grad_sync": "",
    "reshard": "",
    "bucket": "ddp.bucket_size",
    "prefetch": "",
    "order": "dist.use_tp_pp_dp_mapping",
    "first_stage_layers": "model.num_layers_in_first_pipeline_stage",
    "last_stage_layers": "model.num_layers_in_last_pipeline_stage",
    "embedding_as_layer": "model.account_for_embedding_in_pipeline_split",
    "loss_as_layer": "model.account_for_loss_in_pipeline_split",
    "products": "mixed_precision",
    "narrow_parameters": "mixed_precision.fp8_param_gather",
    "first_moment": "optimizer.use_precision_aware_optimizer, optimizer.exp_avg_dtype",
    "second_moment": "optimizer.use_precision_aware_optimizer, optimizer.exp_avg_sq_dtype",
    "master": "optimizer.use_precision_aware_optimizer, optimizer.main_params_dtype",
    "gradients": "optimizer.main_grads_dtype",
    "reduce": "ddp.grad_reduce_in_fp32",
    "optimizer": "optimizer.optimizer",
    "optimizer_offload": "optimizer.optimizer_cpu_offload, optimizer.optimizer_offload_fraction",
    "activation_offload": "model.cpu_offloading, model.cpu_offloading_num_layers",
    "context": "model.cp_comm_type",
    "cross_entropy": "model.cross_entropy_loss_fusion",
    "document": "dataset.offline_packing_specs",
    "mtp": "model.mtp_num_layers",
    "tp_overlap": "comm_overlap.tp_comm_overlap",
    "dispatch": "model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend",
    "overlap_experts": "comm_overlap.overlap_moe_expert_parallel_comm",
}
_LINES = {
    "dp": "megatron/training/arguments.py:446",
    "zero": "megatron/training/arguments.py:2982",
    "shard": "megatron/training/arguments.py:3034",
    "tp": "megatron/core/model_parallel_config.py:55",
    "sp": "megatron/core/model_parallel_config.py:94",
    "cp": "megatron/core/model_parallel_config.py:100",
    "ulysses": "megatron/training/arguments.py:3039",
    "ep": "megatron/core/model_parallel_config.py:127",
    "etp": "megatron/core/model_parallel_config.py:130",
    "pp": "megatron/core/model_parallel_config.py:83",
    "virtual": "megatron/training/arguments.py:2948",
    "schedule": "megatron/core/pipeline_parallel/schedules.py:48",
    "layers": "megatron/training/arguments.py:2935",
    "micro_batch": "megatron/training/config/training_config.py:11",
    "recompute": "megatron/core/transformer/transformer_config.py:529",
    "compression": "megatron/core/distributed/distributed_data_parallel_config.py:12",
    "grad_sync": "megatron/core/pipeline_parallel/schedules.py:733",
    "reshard": "megatron/core/distributed/distributed_data_parallel_config.py:12",
    "bucket": "megatron/training/arguments.py:2957",
    "prefetch": "megatron/core/distributed/distributed_data_parallel_config.py:21",
    "order": "megatron/training/initialize.py:388",
    "first_stage_layers": "megatron/training/arguments.py:2927",
    "last_stage_layers": "megatron/training/arguments.py:2931",
    "embedding_as_layer": "megatron/core/transformer/transformer_config.py:130",
    "loss_as_layer": "megatron/core/transformer/transformer_config.py:134",
    "products": "megatron/core/transformer/transformer_config.py:573",
    "narrow_parameters": "megatron/training/arguments.py:1918",
    "first_moment": "megatron/training/arguments.py:3493",
    "second_moment": "megatron/training/arguments.py:3498",
    "master": "megatron/training/arguments.py:3491",
    "gradients": "megatron/training/arguments.py:2906",
    "reduce": "megatron/training/arguments.py:2890",
    "optimizer": "megatron/training/arguments.py:2761",
    "optimizer_offload": "megatron/training/arguments.py:2770",
    "activation_offload": "megatron/core/model_parallel_config.py:461",
    "context": "megatron/training/arguments.py:3039",
    "cross_entropy": "megatron/core/model_parallel_config.py:320",
    "mtp": "megatron/core/transformer/transformer_config.py:68",
    "tp_overlap": "megatron/core/model_parallel_config.py:265",
    "dispatch": "megatron/core/transformer/transformer_config.py:862",
    "overlap_experts": "megatron/core/model_parallel_config.py:343",
}
_RULES = {
    "layers": "megatron/training/arguments.py:964",
    "middle": "megatron/core/transformer/transformer_config.py:2042",
    "moe_sp": "megatron/core/transformer/moe/moe_layer.py:620",
    "cp_seq": "megatron/training/arguments.py:1279",
    "virtual": "megatron/core/pipeline_parallel/schedules.py:1141",
    "offload_pp": "megatron/core/transformer/transformer_config.py:1714",
    "offload_recompute": "megatron/core/transformer/transformer_config.py:1719",
    "overlap_pp": "megatron/core/transformer/transformer_config.py:2677",
    "overlap_ep": "megatron/core/transformer/transformer_config.py:2682",
    "overlap_full": "megatron/core/transformer/transformer_config.py:2690",
    "tp_overlap": "megatron/training/arguments.py:1385",
    "precision": "megatron/core/optimizer/optimizer_config.py:436",
    "moe_act": "megatron/core/transformer/transformer_config.py:1786",
    "delayed": "megatron/core/transformer/transformer_config.py:1823",
}
_OWN: Facts = {"lora": (None, "peft = LoRA(dim=...)"), "lora_targets": (None, "peft.target_modules")}
_OWN_LINES = {
    "document": "src/megatron/bridge/data/packing/config.py:27",
    "lora": "src/megatron/bridge/peft/lora.py:50",
    "lora_targets": "src/megatron/bridge/peft/lora.py:50",
}


def written_here(facts: Facts) -> Facts:
    """Return Megatron-Core's facts with the names of this configuration."""
    return {name: (fact[0], _WRITTEN[name], *fact[2:]) for name, fact in facts.items()}


def pinned(lines: dict[str, str]) -> dict[str, str]:
    """Return lines of the pinned Megatron-LM as lines of this repository."""
    return {name: _PINNED + line for name, line in lines.items()}


MEGATRON_BRIDGE = Stack(
    name="megatron-bridge",
    title="Megatron-Bridge 0.6 (NeMo)",
    repository="NVIDIA-NeMo/Megatron-Bridge",
    commit="51885cf132b2814188b6855c25a8588254274c2a",
    constants="megatron-bridge-26.08",
    strategy=entries(written_here(STRATEGY), pinned(_LINES)),
    options=entries({**written_here(OPTIONS), **_OWN}, pinned(_LINES) | _OWN_LINES),
    rules=(*rules(pinned(_RULES)), narrow_parameters(_PINNED + "megatron/training/arguments.py:1061")),
    modules=MODULES,
    needs=("CUDA_DEVICE_MAX_CONNECTIONS=1 with tp or cp on GPUs before Blackwell",),
)
