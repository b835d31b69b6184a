"""DeepSpeed's JSON, and GPT-NeoX's YAML, which holds one (deepspeed/runtime/config.py, runtime/zero/config.py)."""

from __future__ import annotations

from typing import Any

from phalanx.formats.read.configuration import Config, Configuration, Keys, Layout, count, divided, product, truth


def offloaded(keys: Keys, at: str = "") -> dict[str, str | None]:
    """Return where state and parameters are, from `zero_optimization` below a path."""
    z = f"{at}zero_optimization"
    result: dict[str, str | None] = {}
    for name, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_params")):
        device = keys.take(f"{z}.offload_{name}.device", f"offload.{name}")
        legacy = truth(keys.take(f"{z}.{old}", f"offload.{name}"))
        result[name] = str(device) if device not in (None, "auto") else "cpu" if legacy else "none"
    return result


def stage(keys: Keys, at: str = "") -> int | None:
    """Return the level of ZeRO: 0 without a table, as DeepSpeed has it."""
    table = keys.take(f"{at}zero_optimization", "strategy.zero")
    keys.understood.pop(f"{at}zero_optimization", None)
    if isinstance(table, bool):
        keys.understood[f"{at}zero_optimization"] = "strategy.zero"
        return int(table)
    if not isinstance(table, dict):
        return 0
    value = keys.take(f"{at}zero_optimization.stage", "strategy.zero", 0)
    return value if isinstance(value, int) and 0 <= value <= 3 else None


def precision(keys: Keys, at: str = "") -> str | None:
    """Return the type of products: fp32 where neither table enables another."""
    found: str | None = "fp32"
    for name, tables in (("fp16", ("fp16",)), ("bf16", ("bf16", "bfloat16"))):
        enabled = keys.first(tuple(f"{at}{t}.enabled" for t in tables), "job.precision")
        if enabled is None and any(isinstance(keys.config.get(t), dict) for t in tables) and not at:
            enabled = None
        if enabled is not None and truth(enabled) is None:
            found = None if found == "fp32" else found
        elif truth(enabled):
            found = name
    return found


def read(config: Config, world: int | None = None) -> Configuration:
    """Read DeepSpeed's table, or GPT-NeoX's options with the same keys."""
    keys = Keys(config)
    neox = any(name.replace("-", "_") in config for name in ("pipe_parallel_size", "num_layers", "hidden_size")) or (
        "pipe-parallel-size" in config or "num-layers" in config
    )
    micro = count(keys.take("train_micro_batch_size_per_gpu", "strategy.micro_batch"))
    whole = count(keys.take("train_batch_size", "job.global_batch"))
    steps = count(keys.take("gradient_accumulation_steps", "accumulation"))
    zero, type_, where = stage(keys), precision(keys), offloaded(keys)
    tp = pp = cp = seq = None
    recompute: str | None = None
    model: dict[str, Any] = {}
    if neox:
        tp = count(keys.take("model_parallel_size", "strategy.tp", 1))
        pp = max(count(keys.take("pipe_parallel_size", "strategy.pp", 0)) or 1, 1)
        seq = count(keys.take("seq_length", "job.seq"))
        recompute = "full" if truth(keys.take("checkpoint_activations", "strategy.recompute")) else None
        named = {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}
        stated = keys.take("precision", "job.precision")
        type_ = named.get(str(stated), type_) if stated is not None else type_
        model = {
            name: keys.take(ours, f"model.{name}")
            for name, ours in (
                ("num_hidden_layers", "num_layers"),
                ("hidden_size", "hidden_size"),
                ("num_attention_heads", "num_attention_heads"),
            )
        }
    else:
        tp = count(keys.take("tensor_parallel.autotp_size", "strategy.tp"))
        cp = count(keys.take("sequence_parallel_size", "strategy.cp"))
    replicas = divided(world, product(tp or 1, pp or 1, cp or 1))
    if steps is None and whole and micro:
        steps = divided(whole, product(micro, replicas))
    if whole is None:
        whole = product(micro, steps, replicas)
    layout = Layout(
        world=world,
        dp=replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        zero=zero,
        micro_batch=micro,
        accumulation=steps,
        global_batch=whole,
        seq=seq,
        precision=type_,
        recompute=recompute,
        offload=where,
    )
    quiet, open_, unknown = keys.rest("megatron" if neox else "deepspeed")
    return Configuration("deepspeed", "deepspeed", layout, keys.understood, quiet, open_, unknown, model)
