"""accelerate's YAML and axolotl's, which has the same tables (accelerate/commands/config/config_args.py,
utils/dataclasses.py, parallelism_config.py)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.frameworks.accelerate import read_axolotl
from phalanx.frameworks.accelerate.read_axolotl import EngineTable
from phalanx.frameworks.configuration import (
    ALL_BLOCKS,
    Config,
    Configuration,
    Keys,
    Partial,
    StatedLayout,
    with_file_keys,
)
from phalanx.frameworks.deepspeed import read as deepspeed
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.trainer_tuning import (
    ATTENTION,
    loss_options,
)
from phalanx.frameworks.values import count, divided, product, truth, zero_level
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

_STRATEGIES = {
    "1": 3, "FULL_SHARD": 3, "2": 2, "SHARD_GRAD_OP": 2, "3": 0, "NO_SHARD": 0,
    "4": 3, "HYBRID_SHARD": 3, "5": 2, "HYBRID_SHARD_ZERO2": 2,
}  # fmt: skip
_HYBRID = ("4", "5", "HYBRID_SHARD")
_TYPES = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "False": "fp32"}


def arguments_job(keys: Keys, at: str) -> dict[str, Any]:
    """Return optimizer and clipping of TrainingArguments; the defaults are AdamW without decay, and norm 1."""
    names = ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm")
    defaults = dict(zip(names, (0.9, 0.999, 1e-8, 0.0, 1.0), strict=True))
    first, second, eps, decay, clip = (keys.number(f"{at}{n}", "job.optimizer", d) for n, d in defaults.items())
    return {"optimizer": {"betas": (first, second), "eps": eps, "weight_decay": decay}, "clip": clip}


def sharding(keys: Keys, table: str = "fsdp_config") -> tuple[int | None, dict[str, str | None], str | None]:
    """Return ZeRO's level, the devices of state and parameters, and recomputation, of FSDP's table."""

    def of(name: str, meaning: str) -> Any:
        return keys.take((f"{table}.fsdp_{name}", f"{table}.{name}"), meaning)

    version = count(of("version", "stack")) or keys.count("fsdp_version", "stack")
    chosen, reshard = of("sharding_strategy", "strategy.zero"), of("reshard_after_forward", "strategy.zero")
    if version == 2:
        zero: int | None = 2 if truth(reshard) is False else 3
    else:
        named = chosen if chosen is not None else reshard
        zero = 3 if named is None else _STRATEGIES.get(str(named).upper())
    device = "cpu" if truth(of("offload_params", "offload.param")) else "none"
    return zero, {"param": device, "optimizer": device}, table_recompute(keys, table)


def table_recompute(keys: Keys, table: str = "fsdp_config") -> str | None:
    """Return the recomputation of FSDP's table, which wraps the units; None: not stated."""
    paths = (f"{table}.fsdp_activation_checkpointing", f"{table}.activation_checkpointing")
    again = truth(keys.take(paths, "strategy.recompute"))
    return None if again is None else "full" if again else "none"


def within_node(keys: Keys, table: str = "fsdp_config") -> bool:
    """Whether FSDP1 shards over the ranks of a node alone (torch/distributed/fsdp/_init_utils.py,
    _init_intra_and_inter_node_groups)."""
    paths = (f"{table}.fsdp_sharding_strategy", f"{table}.sharding_strategy")
    return str(keys.take(paths, "strategy.zero")).upper().startswith(_HYBRID)


def on_host(offload: Mapping[str, str | None] | None) -> dict[str, Any]:
    """Return the options of parameters that FSDP keeps on the host: their gradients and optimizer are there too."""
    away = (offload or {}).get("param") == "cpu"
    return {"parameter_offload": True, "optimizer_offload": 1.0} if away else {}


def checkpointed_to_host(keys: Keys) -> dict[str, Any]:
    """Return the option of checkpoints that are kept on the host (huggingface/accelerate pull 4175)."""
    names = ("fsdp_config.fsdp_activation_checkpointing_offload", "fsdp_config.activation_checkpointing_offload")
    return {"activation_offload": ALL_BLOCKS} if keys.truth(names, "options.activation_offload") else {}


_ATTENTION = ATTENTION | {"disabled": "unfused", "fa2": "flash2", "fa3": "flash3", "flash_attn": "flash2"}
"""Words for attention's kernel, of transformers, of LLaMA-Factory, and of ms-swift."""
_KERNELS = {
    "eager_attention": "unfused", "flash_attention": "flash", "sdp_attention": "flash", "use_flash_attn": "flash",
}  # fmt: skip
"""Switches that choose attention's kernel -> the kernel; axolotl's come first."""


def attention(keys: Keys, at: str = "") -> dict[str, Any]:
    """Return the option of attention's kernel that arguments name; none where they name none. `at`: their path."""
    named = keys.take((f"{at}attn_implementation", f"{at}flash_attn"), "options.attention")
    switched = [core for name, core in _KERNELS.items() if keys.truth(f"{at}{name}", "options.attention")]
    core = _ATTENTION.get(str(named).lower()) or next(iter(switched), None)
    return {"attention": core} if core else {}


def reduction(precision: str | None) -> dict[str, Any]:
    """Return the option of the type in which FSDP reduces gradients under mixed precision: that of its products
    (accelerate 16cb6eb, src/accelerate/utils/dataclasses.py:2120)."""
    return {"reduce": "bfloat16"} if precision in ("bf16", "fp16") else {}


def wrapping(keys: Keys, table: str = "fsdp_config", by_default: str = "") -> dict[str, Any]:
    """Return the options of FSDP's table about which modules it wraps as units. `by_default`: the policy where the
    table has none and no size; "": by class if it names one, else the whole model, as accelerate does."""

    def of(name: str, meaning: str, *more: str) -> Any:
        return keys.take((f"{table}.fsdp_{name}", f"{table}.{name}", *more), meaning)

    # TrainingArguments had a flag for the size, too.
    flag = table.replace("fsdp_config", "fsdp_min_num_params")
    least = count(of("min_num_params", "options.unit_size", flag)) or 0
    by_flag = table.replace("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
    classes = of("transformer_layer_cls_to_wrap", "options.units", by_flag)
    by_default = by_default or ("TRANSFORMER_BASED_WRAP" if classes else "")
    by_default = "SIZE_BASED_WRAP" if least and by_default != "NO_WRAP" else by_default or "NO_WRAP"
    policy = str(of("auto_wrap_policy", "options.units") or by_default).upper()
    if policy == "NO_WRAP" or (policy == "SIZE_BASED_WRAP" and not least):
        return {"units": "model"}
    if policy != "SIZE_BASED_WRAP":
        return {}
    version = count(of("version", "stack")) or keys.count("fsdp_version", "stack")
    return {"units": "module" if version == 2 else "remainder", "unit_size": least}


def in_shards(keys: Keys, at: str = "") -> dict[str, Any]:
    """Return the option that gradients are reduced after every micro-batch, where TrainingArguments turn it on."""
    each = f"{at}accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
    return {"accumulate": "sharded"} if keys.truth(each, "options.accumulate") else {}


def _trainer(keys: Keys) -> tuple[int | None, int | None, dict[str, Any], dict[str, Any]]:
    """Return (micro-batch, accumulation, job, options) of TrainingArguments next to accelerate's file."""
    job = arguments_job(keys, "")
    micro = keys.count("per_device_train_batch_size", "strategy.micro_batch")
    steps = keys.count("gradient_accumulation_steps", "accumulation")
    options = in_shards(keys)
    if keys.truth("tf32", "job.precision"):
        job["compute"] = "tf32"
    return micro, steps, job, options


def _sizes(keys: Keys, axolotl: bool) -> dict[str, int | None]:
    """Return the sizes of the axes of a ParallelismConfig. An axis that it does not name has size 1, but FSDP2 shards
    over all ranks without one of its own (None)."""
    axes = {"dp_replicate": "dp", "dp_shard": "shard", "tp": "tp", "cp": "cp", "sp": "ulysses"}
    result = {}
    for name, axis in axes.items():
        at = "parallelism_config"
        paths = (f"{at}.{at}_{name}_size", f"{at}.{name}_size", *(read_axolotl.AXES.get(name, ()) if axolotl else ()))
        result[name] = keys.count(paths, f"strategy.{axis}", None if name == "dp_shard" else 1)
    return result


def _sharded(kind: str, keys: Keys, engine: Keys, config: Config, axolotl: bool) -> EngineTable:
    """Return the engine that shards the state, and what its table states. `kind`: distributed_type."""
    plain = kind in ("NO", "FALSE", "MULTI_GPU", "MULTI_CPU", "TPU", "XLA")
    if kind == "DEEPSPEED" or (axolotl and config.get("deepspeed")):
        zero, offload, micro, steps = _by_deepspeed(keys, engine, axolotl)
        alone = kind == "DEEPSPEED" and zero is not None
        return EngineTable("deepspeed", zero, offload, micro_batch=micro, accumulation=steps, replicas_only=alone)
    if kind == "FSDP" or (not plain and bool(config.get("fsdp_config") or config.get("fsdp"))):
        zero, offload, recompute = sharding(keys)
        units = wrapping(keys, by_default="TRANSFORMER_BASED_WRAP" if axolotl else "") | checkpointed_to_host(keys)
        keys.take("fsdp", "stack")
        return EngineTable("fsdp", zero, offload, recompute, units=units, replicas_only=True)
    return EngineTable("", 0 if plain else None, replicas_only=kind in ("MULTI_GPU", "NO"))


def _by_deepspeed(
    keys: Keys, engine: Keys, axolotl: bool
) -> tuple[int | None, dict[str, str | None] | None, int | None, int | None]:
    """Return the level of ZeRO, what is offloaded, the micro-batch and the accumulation of accelerate's
    deepspeed_config, or of the file that it names (`engine`)."""
    at, zero, offload, micro, steps = "deepspeed_config", None, None, None, None
    keys.take(("deepspeed", f"{at}.deepspeed_config_file"), "file")
    if f"{at}.deepspeed_config_file" not in keys.understood and not axolotl:
        zero = zero_level(keys.take(f"{at}.zero_stage", "strategy.zero"))
        offload = {
            name: keys.take(f"{at}.offload_{name}_device", f"offload.{name}", "none") or "none"
            for name in ("optimizer", "param")
        }
        steps = keys.count(f"{at}.gradient_accumulation_steps", "accumulation")
    if engine.config:
        zero, offload = deepspeed.stage(engine), deepspeed.offloaded(engine)
        if count(engine.config.get("train_batch_size")):  # the Trainer stops where it is not what it counts
            engine.take("train_batch_size", "job.global_batch")
        micro = engine.count("train_micro_batch_size_per_gpu", "strategy.micro_batch")
        steps = engine.count("gradient_accumulation_steps", "accumulation")
    return zero, offload, micro, steps


def _context(keys: Keys, config: Config, axolotl: bool, cp: int | None) -> dict[str, Any]:
    """Return the option of how ranks of a context exchange keys and values, where it is not a ring. axolotl takes
    ring_flash_attn's llama3 for packed sequences (utils/schemas/validation.py, validate_ring_attn_func)."""
    gathered = False
    if axolotl and (cp or 1) > 1:
        packed = truth(config.get("sample_packing"))  # which changes more than this
        ring = keys.take("ring_attn_func", "options.context", "varlen_llama3" if packed else "batch_ring")
        gathered = ring == "varlen_llama3"
    paths = ("parallelism_config.parallelism_config_cp_comm_strategy", "parallelism_config.cp_comm_strategy")
    gathered = keys.take(paths, "options.context") == "allgather" or gathered
    return {"context": "all_gather"} if gathered else {}


def _number_type(keys: Keys, engine: Keys, config: Config) -> tuple[str | None, str | None]:
    """Return the type of products; and the one where none is stated, None where a DeepSpeed file that was not given
    may state it."""
    elsewhere = {"deepspeed_config.deepspeed_config_file", "deepspeed"} & keys.understood.keys()
    unstated = None if elsewhere or isinstance(config.get("deepspeed"), str) else "fp32"
    named = keys.take(("mixed_precision", "env.ACCELERATE_MIXED_PRECISION"), "job.precision")
    return _TYPES.get(str(named).lower() if named is not False else "no") if named is not None else None, unstated


def _engine_options(s: EngineTable, engine: Keys) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return (options, fields of Strategy, job) of DeepSpeed's file, or of accelerate's table where it names none."""
    if engine.config:
        return deepspeed.engine_settings(engine)
    if s.engine != "deepspeed":
        return {}, {}, {}
    options: dict[str, Any] = {}
    if s.offload:
        options |= {"optimizer_offload": 1.0} if s.offload["optimizer"] != "none" else {}
        options |= {"parameter_offload": True} if s.offload["param"] != "none" else {}
    return options | deepspeed.bucket_buffers(Keys({}), s.zero), {}, {}


def read(config: Config, world: int | None = None) -> Configuration:
    """Read accelerate's file, or axolotl's, with DeepSpeed's where it names one."""
    given, tables = config.get("training_arguments"), config.get("deepspeed_json")
    own = {name: value for name, value in config.items() if name not in ("training_arguments", "deepspeed_json")}
    keys = Keys(Partial(own) if isinstance(config, Partial) else own)
    engine = Keys(tables if isinstance(tables, dict) else {})
    part = Keys(given if isinstance(given, dict) else {})
    axolotl = read_axolotl.is_axolotl(config)
    kind = str(keys.take("distributed_type", "stack", "")).upper()
    processes = keys.count("num_processes", "world")
    world = world or processes

    # Axes, and what shards the state.
    sizes = _sizes(keys, axolotl)
    mesh = "parallelism_config" in config or (axolotl and read_axolotl.has_mesh(config))
    tp, cp = (sizes["tp"], product(sizes["cp"], sizes["sp"])) if mesh else (None, None)
    s = _sharded(kind, keys, engine, config, axolotl)
    if not mesh and not axolotl and s.replicas_only:
        tp = cp = 1  # only a parallelism_config has other axes
    replicas = divided(world, product(tp or 1, cp or 1)) if tp is not None and not axolotl else None
    shard = sizes["dp_shard"] if mesh else None
    if shard is None and s.engine == "fsdp" and within_node(keys):
        nodes = keys.count("num_machines", "strategy.shard") or 1
        shard = divided(world, nodes) if nodes > 1 else None

    # Number types. A DeepSpeed file that was not given may state them.
    type_, unstated = _number_type(keys, engine, config)
    if axolotl:
        s, type_ = read_axolotl.trained_as(keys, s, type_)
        unstated = "fp32"
    half = deepspeed.precision(engine) if engine.config else None
    type_ = half if half in ("bf16", "fp16") and type_ is None else type_

    # Options of the engine, of a Trainer's arguments, of context parallelism.
    job: dict[str, Any] = {"compute": None if isinstance(config, Partial) else unstated}
    beyond, fields, stated = _engine_options(s, engine)
    options, job = s.units | attention(keys) | beyond, job | stated
    if part.config:
        micro, steps, stated, more = _trainer(part)
        s = replace(s, micro_batch=micro, accumulation=steps)
        job, options = job | stated, options | more | attention(part) | loss_options(part, "", plain=True)[0]
        if part.truth("gradient_checkpointing", "strategy.recompute"):
            s = replace(s, recompute="full")
    if type_ not in (None, "fp32"):
        job["compute"] = type_
    if s.engine == "fsdp":
        options |= (reduction(type_) if ZERO_LEVELS[s.zero or 0].state else {}) | on_host(s.offload)
    options |= _context(keys, config, axolotl, cp)
    tuning = read_axolotl.tuning(keys, engine, s, type_) if axolotl else read_axolotl.UNTUNED
    micro = product(s.micro_batch, tuning.sequences)
    layout = StatedLayout(
        world=world,
        dp=replicas,
        tp=tp,
        cp=cp,
        zero=s.zero,
        shard=shard,
        micro_batch=micro,
        accumulation=s.accumulation,
        global_batch=product(micro, s.accumulation, replicas),
        seq=keys.count("sequence_len", "job.seq"),
        precision=type_,
        recompute=s.recompute,
        offload=s.offload,
    )
    stack = "deepspeed" if s.engine == "deepspeed" else "accelerate"
    c = keys.configuration(
        "accelerate",
        stack,
        layout,
        key_table("accelerate"),
        model_name=str(keys.take("base_model", "model", "") or ""),
        unpriced=tuning.unpriced,
        options=options | tuning.options,
        fields=fields,
        job=job | tuning.job,
        notes=tuning.notes,
    )
    for file, table, kind in ((part, "training_arguments", "hugging_face"), (engine, "deepspeed_json", "deepspeed")):
        if file.config:
            c = with_file_keys(c, file.configuration(kind, stack, layout, key_table(kind)), table)
    return c
