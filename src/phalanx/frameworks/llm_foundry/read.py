"""llm-foundry's YAML of a training, with overrides of its command line (mosaicml/llm-foundry 8c8dd48,
llmfoundry/command_utils/train.py, utils/config_utils.py: TrainConfig), and the run of MosaicML's platform that holds
one under `parameters`. Composer 6405188 shards and recomputes (composer/utils/parallelism.py: FSDPConfig)."""

from collections.abc import Mapping
from typing import Any, TypeVar

from phalanx.frameworks.configuration import Config, Configuration, Keys, Partial, StatedLayout
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.llm_foundry import mpt
from phalanx.frameworks.tables import resolve_references
from phalanx.frameworks.trainer_tuning import adapter_options
from phalanx.frameworks.values import count, divided
from phalanx.spec.errors import InputError, nearest

T = TypeVar("T")
_LEVELS = {
    "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2,
}  # fmt: skip
_PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "amp_fp8": "fp8", "fp32": "fp32", "bf16": "bf16"}
_ADAMW = ("decoupled_adamw", "adamw")


def read(config: Config, world: int | None = None) -> Configuration:
    """Read a training's tables. Each rank has an equal share of the global batch, in micro-batches of a stated size;
    `auto` is the size that fits, which is not known. Without fsdp_config replicas are DDP's."""
    if isinstance(inner := config.get("parameters"), Mapping):
        compute = config.get("compute")
        world = world or count(compute.get("gpus") if isinstance(compute, Mapping) else None)
        config = resolve_references(inner)
    keys = Keys(config, key_table("llm_foundry"))
    zero, shard, recompute = _sharding(keys, world)
    whole = keys.count("global_train_batch_size", "job.global_batch")
    micro = keys.count("device_train_microbatch_size", "strategy.micro_batch")
    steps = keys.count("device_train_grad_accum", "accumulation")  # before v0.1
    rank_batch = divided(whole, world)
    micro = micro or divided(rank_batch, steps)
    seq = keys.count("max_seq_len", "job.seq")
    for name in ("model.max_seq_len", "model.config_overrides.max_seq_len"):
        keys.take(name, "model.max_seq")
    precision = _meaning(_PRECISIONS, "precision", keys.take("precision", "job.precision", "amp_bf16"))
    of_its_own = keys.take("model.name", "model") == "mpt_causal_lm"
    spec, why = mpt.model(keys, seq) if of_its_own else (None, "")
    trained, unpriced = adapter_options(keys, "model.peft_config.")
    core = mpt.attention(keys, of_its_own)
    options: dict[str, Any] = {**trained, **({"attention": core} if core else {})}
    if zero and _stated(keys, "fsdp_config.mixed_precision") in (None, "PURE", "DEFAULT"):
        pure = keys.take("fsdp_config.mixed_precision", "options.reduce", "DEFAULT") == "PURE"
        options["reduce"] = "bfloat16" if pure and precision != "fp32" else "float32"
    if keys.take("model.loss_fn", "options.cross_entropy") == "torch_crossentropy":
        options["cross_entropy"] = "plain"
    if precision == "fp8":  # Transformer Engine's, with scales of earlier steps (composer/core/precision.py)
        options["products"] = "float8-delayed"
    layout = StatedLayout(
        world=world,
        dp=world,
        tp=1,
        cp=1,
        pp=1,
        zero=zero,
        shard=shard,
        micro_batch=micro,
        accumulation=steps or (-(-rank_batch // micro) if rank_batch and micro else None),
        global_batch=whole,
        seq=seq,
        precision=precision,
        recompute=recompute,
    )
    return keys.configuration(
        "llm-foundry",
        _stack(core, options.get("reduce") == "bfloat16"),
        layout,
        model_name=str(keys.take("model.pretrained_model_name_or_path", "model", "") or ""),
        spec=spec,
        open_model=why,
        unpriced=unpriced,
        options={name: value for name, value in options.items() if value != mpt.TRITON},
        job=_job(keys, precision),
    )


def _stack(core: str, pure: bool) -> str:
    """Return the stack with prices for attention's kernel; published runs with Triton's have stacks of their own.
    `pure`: whether gradients are reduced in bf16."""
    return "llm-foundry-flash2" if core != mpt.TRITON else "llm-foundry-pure" if pure else "llm-foundry"


def _stated(keys: Keys, path: str) -> Any:
    """Return the value at a path without taking its key."""
    return Keys(keys.config).take(path, "")


def _sharding(keys: Keys, world: int | None) -> tuple[int | None, int | None, str]:
    """Return ZeRO's level, the ranks over which state is sharded (None: not stated), and recomputation."""
    table = keys.config.get("fsdp_config")
    if not isinstance(table, Mapping):
        if str(table).startswith("$"):  # a variable that the file leaves open
            keys.take("fsdp_config", "strategy.zero")
        return (None if isinstance(keys.config, Partial) else 0), None, "none"
    named = keys.take("fsdp_config.sharding_strategy", "strategy.zero", "FULL_SHARD")
    replicas = keys.count("fsdp_config.data_parallel_replicate_degree", "strategy.shard")
    shard = keys.count("fsdp_config.data_parallel_shard_degree", "strategy.shard")
    mesh = keys.take("fsdp_config.device_mesh", "strategy.shard")
    if isinstance(mesh, list) and len(mesh) == 2:  # of Composer before 0.24
        shard = count(mesh[1])
    again = keys.truth("fsdp_config.activation_checkpointing", "strategy.recompute", False)
    zero = None if named is None else _meaning(_LEVELS, "fsdp_config.sharding_strategy", str(named).upper())
    return zero, shard or divided(world, replicas), "full" if again else "none"


def _meaning(known: Mapping[str, T], key: str, value: Any) -> T | None:
    """Return the meaning of a key's word; None where the value is None. Raises InputError for an unknown word."""
    if value is None or (word := str(value)) in known:
        return None if value is None else known[word]
    raise InputError(key, value, "is not a word of llm-foundry", nearest(word, known))


def _job(keys: Keys, precision: str | None) -> dict[str, Any]:
    """Return the optimizer, clipping and the type of products."""
    if _stated(keys, "optimizer.name") in _ADAMW:
        keys.take("optimizer.name", "job.optimizer")
    threshold = "algorithms.gradient_clipping.clipping_threshold"
    clipped = keys.take("algorithms.gradient_clipping.clipping_type", "job.clip", "norm") == "norm"
    return {
        "optimizer": {
            "betas": keys.betas("optimizer.betas", (0.9, 0.999)),
            "eps": keys.number("optimizer.eps", "job.optimizer", 1e-8),
            "weight_decay": keys.number("optimizer.weight_decay", "job.optimizer", 0.0),
        },
        "clip": keys.number(threshold, "job.clip", 0.0) if clipped else 0.0,
        "compute": "bf16" if precision == "fp8" else precision,
    }
