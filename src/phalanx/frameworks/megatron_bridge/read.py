"""NeMo's, Megatron-Bridge's and NeMo-RL's YAML: Megatron's names at places that differ by release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout, count, divided, product, truth
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.megatron import read_options as beyond
from phalanx.frameworks.megatron_bridge import read_container as bridge

_PLACES = (
    *(
        "policy.megatron_cfg.",
        "policy.dtensor_cfg.",
        "policy.",
        "",
        "model.",
        "train.",
        "trainer.",
        "trainer.strategy.",
        "strategy.",
        "data.",
        "dataset.",
        "parallelism.",
    ),
    *("distributed_strategy.", "args."),
    *("model.distributed_strategy.", "model.data.", "recipe.", "log.", "config."),
    "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.",
)
_TYPES = {
    "bf16": "bf16", "bf16-mixed": "bf16", "bf16_mixed": "bf16", "bfloat16": "bf16", "16": "fp16", "16-mixed": "fp16",
    "fp16": "fp16", "float16": "fp16", "32": "fp32", "fp32": "fp32", "float32": "fp32",
}  # fmt: skip


def read(config: Config, world: int | None = None) -> Configuration:
    """Read a file of the family: each name is looked for where its releases have it. One that has Megatron's names
    and lacks a degree has 1."""
    if bridge.is_container(config):
        return bridge.read(config, world)
    keys = Keys(config)

    def of(meaning: str, *names: str) -> Any:
        return keys.first(tuple(place + name for name in names for place in _PLACES), meaning)

    def degree(meaning: str, *names: str) -> int | None:
        return count(of(meaning, *names))

    reinforced = isinstance(config.get("policy"), Mapping)
    nodes = count(keys.first(("trainer.num_nodes", "cluster.num_nodes", "num_nodes"), "world"))
    each = count(keys.first(("trainer.devices", "cluster.gpus_per_node", "devices"), "world"))
    world = world or product(nodes, each)
    # A file that inherits (NeMo-RL's `defaults`) says nothing by what it lacks.
    tp = degree("strategy.tp", "tensor_model_parallel_size", "tensor_parallel_size")
    pp = degree("strategy.pp", "pipeline_model_parallel_size", "pipeline_parallel_size")
    cp = degree("strategy.cp", "context_parallel_size")
    ep = degree("strategy.ep", "expert_model_parallel_size", "expert_parallel_size")
    micro = degree("strategy.micro_batch", "micro_batch_size", "train_micro_batch_size")
    whole = degree("job.global_batch", "global_batch_size", "train_global_batch_size")
    named = keys.take("trainer.precision", "job.precision") or of("job.precision", "precision", "precision_config")
    fp8 = truth(of("options.products", "fp8")) if not isinstance(of("options.products", "fp8"), str) else True
    granularity = of("strategy.recompute", "activations_checkpoint_granularity", "recompute_granularity")
    checkpointing = truth(of("strategy.recompute", "activation_checkpointing"))
    recompute = str(granularity) if granularity in ("full", "selective") else None
    stated = any(p.rpartition(".")[2] == "activations_checkpoint_granularity" for p in keys.understood)
    if stated and granularity is None:
        recompute = "none"
    if recompute is None and checkpointing is not None:
        recompute = "full" if checkpointing else "none"
    distributed = truth(of("strategy.zero", "use_distributed_optimizer", "zero1"))
    dp = divided(world, product(tp or 1, pp or 1, cp or 1)) if tp or pp else None
    virtual = degree("strategy.virtual", "virtual_pipeline_model_parallel_size", "virtual_pipeline_parallel_size")
    layout = StatedLayout(
        world=world,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=1 if distributed else None,
        sp=truth(of("strategy.sp", "sequence_parallel")),
        virtual=virtual,
        micro_batch=micro,
        accumulation=None if reinforced else divided(whole, product(micro, dp)),
        global_batch=whole,
        seq=degree("job.seq", "seq_length", "encoder_seq_length", "max_total_sequence_length"),
        precision="fp8" if fp8 else _TYPES.get(str(named).lower()) if named is not None else None,
        recompute=recompute,
    )

    def flag(name: str, meaning: str, default: Any = None) -> Any:
        value = of(meaning, name)
        return default if value is None else value

    experts = degree("model.experts", "num_moe_experts", "num_experts")
    options = beyond.options(flag, experts is not None, cp)
    for name, key in (
        ("products", "fp8_recipe"),
        ("dispatch", "moe_token_dispatcher_type"),
        ("graphs", "cuda_graph_impl"),
        ("routing", "moe_router_force_load_balancing"),
    ):
        if of(f"options.{name}", key) is None:  # the release's own, or inherited
            options.pop(name, None)
    model = {
        theirs: of(f"model.{theirs}", ours)
        for ours, theirs in (
            ("num_layers", "num_hidden_layers"),
            ("hidden_size", "hidden_size"),
            ("ffn_hidden_size", "intermediate_size"),
            ("num_attention_heads", "num_attention_heads"),
            ("num_query_groups", "num_key_value_heads"),
        )
    }
    sizes = {name: value for name, value in model.items() if value is not None}
    return keys.configuration(
        "nemo", "megatron-bridge", layout, key_table("megatron_bridge"), model=sizes, options=options
    )
