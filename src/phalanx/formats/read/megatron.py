"""Megatron-LM's arguments, as a command line, a script or YAML (megatron/training/arguments.py: `validate_args`)."""

from __future__ import annotations

from typing import Any

from phalanx.formats.read.configuration import Config, Configuration, Keys, Layout, count, divided, product, truth

_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_MODEL = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "vocab_size": "vocab_size",
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}


def read(config: Config, world: int | None = None) -> Configuration:
    """Read {launch, env, args}, or the arguments alone. Defaults are those of `validate_args`: degrees 1, one
    micro-batch for each replica, no ZeRO without --use-distributed-optimizer."""
    args = config["args"] if isinstance(config.get("args"), dict) else config
    at = "args." if args is not config else ""
    keys = Keys(config)

    def flag(name: str, meaning: str, default: Any = None) -> Any:
        return keys.take(f"{at}{name}", meaning, default)

    def degree(name: str, meaning: str) -> int | None:
        value = flag(name, meaning, 1)
        return None if value is None else count(value)

    if world is None and at:
        nodes = keys.take("launch.nnodes", "world", 1)
        world = product(count(nodes), count(keys.take("launch.nproc_per_node", "world")))
    tp = degree("tensor_model_parallel_size", "strategy.tp")
    pp = degree("pipeline_model_parallel_size", "strategy.pp")
    cp = degree("context_parallel_size", "strategy.cp")
    ep = degree("expert_model_parallel_size", "strategy.ep")
    dp = divided(world, product(tp, pp, cp))
    micro = count(flag("micro_batch_size", "strategy.micro_batch"))
    whole = count(flag("global_batch_size", "job.global_batch"))
    layers = count(flag("num_layers", "model.num_hidden_layers"))
    per_stage = count(flag("num_layers_per_virtual_pipeline_stage", "strategy.virtual"))
    stages = count(flag("num_virtual_stages_per_pipeline_rank", "strategy.virtual"))
    virtual = stages or divided(divided(layers, pp), per_stage) if (stages or per_stage) else 1
    # A word of a flag without a value is true.
    strategy = flag("data_parallel_sharding_strategy", "strategy.zero")
    distributed = truth(flag("use_distributed_optimizer", "strategy.zero"))
    fsdp2 = truth(flag("use_torch_fsdp2", "strategy.zero"))
    custom = truth(flag("use_megatron_fsdp", "strategy.zero")) or truth(flag("use_custom_fsdp", "strategy.zero"))
    zero: int | None = 3 if fsdp2 else _SHARDED.get(str(strategy)) if custom and strategy else 1 if distributed else 0
    stage = flag("zero_stage", "strategy.zero")
    if truth(flag("deepspeed", "stack")):
        zero = stage if isinstance(stage, int) else None
    granularity = flag("recompute_granularity", "strategy.recompute")
    old = truth(flag("checkpoint_activations", "strategy.recompute")) or truth(
        flag("recompute_activations", "strategy.recompute")
    )
    full = truth(args.get("checkpoint-activations", args.get("checkpoint_activations")))
    recompute = (
        str(granularity)
        if granularity in ("full", "selective")
        else "full"
        if full
        else "selective"
        if old
        else "none"
    )
    fp8 = flag("fp8_format", "options.products") or flag("fp8", "options.products")
    named = (
        "bf16" if truth(flag("bf16", "job.precision")) else "fp16" if truth(flag("fp16", "job.precision")) else "fp32"
    )
    offload = truth(flag("optimizer_cpu_offload", "offload.optimizer")) or truth(flag("cpu_optimizer", "offload"))
    sp = truth(flag("sequence_parallel", "strategy.sp", False))
    flag("use_mcore_models", "stack")
    keys.take("env.CUDA_DEVICE_MAX_CONNECTIONS", "environment")
    model = {theirs: flag(ours, f"model.{theirs}") for ours, theirs in _MODEL.items()}
    layout = Layout(
        world=world,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=count(flag("expert_tensor_parallel_size", "strategy.etp")),
        zero=zero,
        sp=bool(sp) and (tp or 1) > 1,
        virtual=virtual,
        schedule="interleaved" if virtual and virtual > 1 else "1f1b" if pp and pp > 1 else None,
        micro_batch=micro,
        accumulation=divided(whole, product(micro, dp)) if whole else 1 if dp else None,
        global_batch=whole or product(micro, dp),
        seq=count(flag("seq_length", "job.seq")) or count(flag("encoder_seq_length", "job.seq")),
        precision="fp8" if fp8 else named,
        recompute=recompute,
        offload={"optimizer": "cpu" if offload else "none", "param": "none"},
    )
    stack = "megatron-fsdp" if custom or fsdp2 else "megatron-core"
    model = {name: value for name, value in model.items() if value is not None}
    quiet, open_, unknown = keys.rest("megatron")
    return Configuration("megatron", stack, layout, keys.understood, quiet, open_, unknown, model)
