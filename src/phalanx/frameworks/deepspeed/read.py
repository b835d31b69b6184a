"""DeepSpeed's JSON, and GPT-NeoX's YAML, which holds one (deepspeed/runtime/config.py, runtime/zero/config.py)."""

from dataclasses import replace
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout
from phalanx.frameworks.deepspeed import neox
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.values import count, divided, number, product, truth, zero_level

KEYS = key_table("deepspeed")
GRADIENT_BYTES = 2
"""Bytes of a gradient in a bucket: gradients are in the type of the parameters."""


def offloaded(keys: Keys) -> dict[str, str | None]:
    """Return the devices of the optimizer's state (`optimizer`) and of parameters (`param`): none, cpu or nvme."""
    z = "zero_optimization"
    result: dict[str, str | None] = {}
    for name, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_params")):
        device = keys.take(f"{z}.offload_{name}.device", f"offload.{name}")
        legacy = keys.truth(f"{z}.{old}", f"offload.{name}")
        result[name] = str(device) if device not in (None, "auto") else "cpu" if legacy else "none"
    return result


def stage(keys: Keys) -> int | None:
    """Return the level of ZeRO: 0 without a table, as DeepSpeed has it."""
    table = keys.take("zero_optimization", "strategy.zero")
    keys.understood.pop("zero_optimization", None)
    if isinstance(table, bool):
        keys.understood["zero_optimization"] = "strategy.zero"
        return int(table)
    if not isinstance(table, dict):
        return 0
    return zero_level(keys.take(KEYS["strategy.zero"], "strategy.zero", 0))


def precision(keys: Keys) -> str | None:
    """Return the type of products: fp32 where neither table enables another; None where one says `auto`."""
    number_format: str | None = "fp32"
    for name, tables in (("fp16", ("fp16",)), ("bf16", ("bf16", "bfloat16"))):
        enabled = keys.take(tuple(f"{t}.enabled" for t in tables), "job.precision")
        if enabled is not None and truth(enabled) is None:
            number_format = None if number_format == "fp32" else number_format
        elif truth(enabled):
            number_format = name
    return number_format


def bucket_buffers(keys: Keys, level: int | None) -> dict[str, str]:
    """Return the option of the buffers that gradients are copied into, of a bucket each, where it is not the default:
    none, or below level 3 one unless reductions overlap the backward pass (deepspeed/runtime/zero/config.py:384)."""
    copies = keys.truth("zero_optimization.contiguous_gradients", "options.bucket_buffers")
    overlaps = keys.truth("zero_optimization.overlap_comm", "options.bucket_buffers")
    if not level or (copies is not False and (overlaps or level == 3)):
        return {}
    return {"bucket_buffers": "none" if copies is False else "one"}


def engine_settings(keys: Keys) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return (options, fields of Strategy, job) of DeepSpeed's table."""
    z = "zero_optimization"
    where = offloaded(keys)
    options: dict[str, Any] = dict(bucket_buffers(keys, stage(keys)))
    if where["optimizer"] != "none":
        options["optimizer_offload"] = keys.number(f"{z}.offload_optimizer.ratio", "options", 1.0)
    if where["param"] != "none":
        options["parameter_offload"] = True
    for name in ("gradients", "reduce"):
        word = keys.take(KEYS[f"options.{name}"], f"options.{name}")
        if (value := KEYS.value(f"options.{name}", word)) is not None:
            options[name] = value
    if keys.truth("bf16.bf16_optimizer_states", "options.first_moment"):
        options |= {"first_moment": "bfloat16", "second_moment": "bfloat16"}
        keys.take("bf16.bf16_master_weights_and_grads", "options.first_moment")
    kind = str(keys.take("optimizer.type", "job.optimizer", "") or "")
    if kind and keys.truth("optimizer.params.torch_adam", "options.update"):  # in place of its own kernel
        options["update"] = "foreach"
    if kind.lower() == "muon":
        options["optimizer"] = "muon"
    size = keys.count(KEYS["strategy.bucket"], "strategy.bucket")
    fields: dict[str, Any] = {"bucket": size * GRADIENT_BYTES / 2**20} if size else {}
    job: dict[str, Any] = {}
    if (clip := keys.take(KEYS["job.clip"], "job.clip")) not in (None, "auto"):
        job["clip"] = number(clip, 0.0)
    betas = keys.take("optimizer.params.betas", "job.optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2 and "auto" not in betas:
        job["optimizer"] = {
            "betas": tuple(number(b, 0.9) for b in betas),
            "eps": keys.number("optimizer.params.eps", "job.optimizer.eps", 1e-8),
            "weight_decay": keys.number("optimizer.params.weight_decay", "job.optimizer", 0.01),
        }
    return options, fields, job


def shard(keys: Keys) -> int | None:
    """Return the number of ranks over which state is sharded (MiCS); None: over all."""
    return keys.count(KEYS["strategy.shard"], "strategy.shard")


def read(config: Config, world: int | None = None) -> Configuration:
    """Read DeepSpeed's table, or GPT-NeoX's options with the same keys."""
    keys = Keys(config, KEYS)
    is_neox = neox.is_neox(config)
    micro = count(keys.field("strategy.micro_batch"))
    whole = count(keys.field("job.global_batch"))
    steps = count(keys.field("accumulation"))
    zero, type_, offload = stage(keys), precision(keys), offloaded(keys)
    tp = pp = cp = seq = None
    recompute: str | None = None
    if is_neox:
        tp = keys.count("model_parallel_size", "strategy.tp", 1)
        pp = max(keys.count("pipe_parallel_size", "strategy.pp", 0) or 1, 1)
        seq = keys.count("seq_length", "job.seq")
        recompute = "full" if keys.truth("checkpoint_activations", "strategy.recompute") else None
        named = {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}
        stated = keys.take("precision", "job.precision")
        type_ = named.get(str(stated), type_) if stated is not None else type_
    else:
        tp = count(keys.field("strategy.tp"))
        cp = count(keys.field("strategy.cp"))
    inner = product(tp or 1, pp or 1, cp or 1)
    world = world or product(divided(whole, product(micro, steps)), inner)  # runtime/config.py, _batch_assertion
    replicas = divided(world, inner)
    if steps is None and whole and micro:
        steps = divided(whole, product(micro, replicas))
    if whole is None:
        whole = product(micro, steps, replicas)
    options, fields, job = engine_settings(keys)
    layout = StatedLayout(
        world=world,
        shard=shard(keys),
        ulysses=cp,
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
        offload=offload,
    )
    stack = "deepspeed"
    described: dict[str, Any] = {}
    if is_neox:
        stack, options["attention"] = neox.stack(type_), neox.attention(keys)
        options.pop("bucket_buffers", None)  # part of that stack's constants
        spec, why, notes = neox.model(keys, layout)
        if not {"optimizer", "zero_optimization", "train_micro_batch_size_per_gpu"} & set(config):
            notes = (*notes, "it has sizes alone: ZeRO and precision are in another file of its command, give it too")
            layout = replace(layout, zero=None, precision=None)
        described = {"spec": spec, "open_model": why, "notes": notes, "model": neox.sizes(keys)}
    return keys.configuration(
        "deepspeed",
        stack,
        layout,
        KEYS,
        options=options,
        fields=fields,
        job=job | {"compute": type_},
        **described,
    )
