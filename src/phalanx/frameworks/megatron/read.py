"""Megatron-LM's arguments, as a command line, a script or YAML (megatron/training/arguments.py: `validate_args`)."""

from collections.abc import Callable
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout, with_file_keys
from phalanx.frameworks.deepspeed import read as deepspeed
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.megatron import patterns, read_batch, read_deepspeed, read_layout
from phalanx.frameworks.megatron import read_model as shaped
from phalanx.frameworks.megatron import read_options as beyond
from phalanx.frameworks.trainer_tuning import adapter_options, preference_options
from phalanx.frameworks.values import count, divided, product, truth, zero_level
from phalanx.spec.errors import InputError
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.spec.strategy import stack_options
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

KEYS = key_table("megatron")
_SWITCHES = (
    *("strategy.sp", "strategy.zero", "strategy.order", "model.qk_norm", "options.embedding_as_layer"),
    *("model.output_gate", "model.experts.shared_gate"),
    *("options.loss_as_layer", "options.document", "options.tp_overlap", "options.overlap_experts"),
    "options.cross_entropy",
)
"""Fields whose flags take no value."""
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


_MULTIPLE = 128
"""Default of --make-vocab-size-divisible-by (megatron/training/arguments.py:2358)."""


def read(config: Config, world: int | None = None) -> Configuration:
    """Read {launch, env, args}, or the arguments alone. Defaults are as in `validate_args`: degrees 1, one
    micro-batch for each replica, no ZeRO without --use-distributed-optimizer."""
    args = config["args"] if isinstance(config.get("args"), dict) else config
    at = "args." if args is not config else ""
    _require_values(args)
    keys = Keys(config)

    def flag(name: str, meaning: str, default: Any = None) -> Any:
        return keys.take(f"{at}{name}", meaning, default)

    world = world or (_world(keys, flag) if at else None)
    if "world_size" in args:
        _derived(flag, args)
    trained, unpriced = _adapters(keys, at, args) if flag("finetuning_type", "options.lora") else ({}, "")
    # ms-swift's, whose reference passes run whatever the loss is (swift/megatron/trainers/dpo_trainer.py:84).
    scored, sequences, preferred = preference_options(keys, at, bool(trained), skips=())
    b = read_batch.batch(flag, args, world, sequences)
    tp, pp, cp, dp = b.tp, b.pp, b.cp, b.dp
    preferred = (*preferred, *b.notes)

    # Blocks, and how the pipeline spreads them.
    layers = count(flag("num_layers", "model.num_hidden_layers"))
    hybrid = patterns.stated_pattern(flag, layers)
    layers = layers if hybrid is None else len(hybrid.symbols)
    experts = count(flag("num_experts", "model.experts"))
    extra = beyond.options(flag, experts is not None, cp)
    if experts is None and (b.ep or 1) > 1:
        extra |= beyond.stated_dispatch(flag)
    ends = sum(bool(extra.get(f"{n}_as_layer")) for n in ("embedding", "loss"))
    virtual, blocks = read_layout.chunks(flag, pp, None if layers is None else layers + ends, hybrid)
    if hybrid is not None and hybrid.depths:
        extra["mtp"] = hybrid.depths

    # What shards the state, and what is recomputed.
    zero, fsdp = read_layout.sharding(flag)
    instances = count(flag("num_distributed_optimizer_instances", "strategy.shard"))
    stage = flag("zero_stage", "strategy.zero")
    engine: Configuration | None = None
    if by_deepspeed := truth(flag("deepspeed", "stack")):
        zero, engine = _deepspeed(stage, config, dp)
        if engine is not None or zero is not None:  # of a file that is not here, the flag says the level
            keys.understood[f"{at}deepspeed_config"] = "file"
    recompute, recomputed = read_layout.recomputation(flag)
    named = (
        "bf16" if truth(flag("bf16", "job.precision")) else "fp16" if truth(flag("fp16", "job.precision")) else "fp32"
    )
    offload = extra.get("optimizer_offload") or truth(flag("cpu_optimizer", "offload"))
    sp = truth(flag("sequence_parallel", "strategy.sp", False))
    if by_deepspeed:
        flag("deepspeed_activation_checkpointing", "strategy.recompute")  # which function recomputes
        level, zero = zero, read_deepspeed.level(zero, named)
        preferred = (*preferred, read_deepspeed.SHARDED) if zero != level else preferred
        blocks = blocks or read_deepspeed.stage_blocks(flag("pp_partition_method", "strategy.layers"), layers, pp)
    elif not fsdp:  # the prices of others are of runs, which overlapped as they did
        extra = beyond.with_exposed(extra, flag, bool(sp) and (tp or 1) > 1, product(dp, cp), zero)

    # Kernels, what is assumed of the data, the model.
    flag("use_mcore_models", "stack")
    extra |= _environment(keys)
    model = {theirs: flag(ours, f"model.{theirs}") for ours, theirs in _MODEL.items()}
    model["num_hidden_layers"] = layers if layers is not None else model["num_hidden_layers"]
    spec, why, assumptions = shaped.model(flag, hybrid)
    multiple = count(flag("make_vocab_size_divisible_by", "options.vocab_multiple"))
    exact = any(flag(name, "model.vocab") is not None for name in shaped.PADDED)
    if not exact and (multiple or model["vocab_size"] or spec):
        extra["vocab_multiple"] = multiple or _MULTIPLE
    etp = count(flag("expert_tensor_parallel_size", "strategy.etp"))
    narrow = "bfloat16" in (extra.get("gradients"), extra.get("reduce"))
    products = NUMBER_FORMATS.get(str(extra.get("products")))
    eight = products is not None and products.bits == 8
    layout = StatedLayout(
        world=b.world,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=b.ep,
        etp=(etp or tp) if experts or (etp and (b.ep or 1) > 1) else None,
        zero=zero,
        shard=divided(dp, instances) if instances and instances > 1 else None,
        layers=blocks,
        ulysses=b.ulysses or read_layout.ulysses(flag, cp),
        recomputed=recomputed,
        sp=bool(sp) and (tp or 1) > 1,
        virtual=virtual,
        schedule="interleaved" if virtual and virtual > 1 else "1f1b" if pp and pp > 1 else None,
        micro_batch=b.micro_batch,
        accumulation=b.accumulation,
        global_batch=b.sequences,
        seq=b.seq,
        precision="fp8" if eight else named,
        recompute=recompute,
        offload={"optimizer": "cpu" if offload else "none", "param": "none"},
    )
    stack = "megatron-fsdp" if fsdp else "megatron-core"
    if by_deepspeed:  # Megatron-DeepSpeed, whose unfused releases are known by published runs
        stack = "megatron-deepspeed-2022-bf16" if named == "bf16" else "megatron-deepspeed-2022"
    elif not fsdp and not sp and zero is not None and not ZERO_LEVELS[zero].state:
        stack, early = _release(args)
        preferred = (*preferred, *early)
    if trained:  # ms-swift's adapters, which Megatron-Core has none of
        stack, extra = "megatron-bridge", extra | trained
    extra |= scored
    model = {name: value for name, value in model.items() if value is not None}
    fields, job = beyond.fields(flag, 2 if narrow else 4), beyond.job(flag) | {"compute": named}
    tables = Keys({name: value for name, value in config.items() if name != "deepspeed_json"})
    tables.understood = keys.understood
    c = tables.configuration(
        "megatron",
        stack,
        layout,
        KEYS,
        model=model,
        spec=spec,
        open_model=why,
        options=extra,
        fields=fields,
        job=job,
        unpriced=unpriced,
        notes=(*assumptions, *preferred),
    )
    return c if engine is None else with_file_keys(c, engine, "deepspeed_json")


def _deepspeed(stage: Any, config: Config, dp: int | None) -> tuple[int | None, Configuration | None]:
    """Return the level of ZeRO under DeepSpeed, of its file or else of --zero-stage; and its file, if it is here."""
    if not isinstance(file := config.get("deepspeed_json"), dict):
        return zero_level(stage), None
    engine = deepspeed.read(file, dp)
    return engine.layout.zero, engine


def _environment(keys: Keys) -> dict[str, Any]:
    """Return the options that variables state: attention's kernel, and what is assumed of the data."""
    kernels = [keys.take(f"env.NVTE_{name}_ATTN", "options.attention") for name in ("FLASH", "FUSED")]
    unfused = {"attention": "unfused"} if all(truth(kernel) is False for kernel in kernels) else {}
    keys.take("env.CUDA_DEVICE_MAX_CONNECTIONS", "environment")
    assumed = keys.take("env.PHALANX_ASSUMES", "options")  # of the data, which no flag states
    return unfused | (stack_options.parse(str(assumed)) if assumed else {})


def _adapters(keys: Keys, at: str, args: Config) -> tuple[dict[str, Any], str]:
    """Return the options of ms-swift's adapters, and why they cannot be priced; "" if they can."""
    trained, unpriced = adapter_options(keys, at)
    routed = any(str(name).replace("-", "_").startswith(("moe_", "expert_model_")) for name in args)
    if routed and trained.get("lora") and "lora_targets" not in trained:
        trained["lora_targets"] = "experts"  # TEGroupedLinear is linear (swift/megatron/utils/utils.py:27)
    return trained, unpriced


def _release(args: Config) -> tuple[str, tuple[str, ...]]:
    """Return the stack of the release that takes all flags, with a note where that is an early one."""
    early = next((name for name in _EARLY if args.get(name, args.get(name.replace("_", "-")))), None)
    if early is None:
        return "megatron-core", ()
    note = f"--{early.replace('_', '-')} is a flag of releases before May 2022: {_EARLY[early]}"
    return _EARLY[early], (note,)


_EARLY = {
    "model_parallel_size": "megatron-2020",
    "checkpoint_activations": "megatron-2021",
    "activations_checkpoint_method": "megatron-2021",
}
"""Flags that no release since May 2022 takes (its arguments.py, cfd2e216) -> the stack of the releases before."""
_NUMBERS = {key.name.lstrip("-") for key in KEYS.keys if not key.words and not key.field.startswith(_SWITCHES)}
"""Flags that take a value."""
_VIRTUAL = (
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "pipeline-model-parallel-layout",
)
"""Of these at most one is taken (validate_args)."""


def _require_values(args: Config) -> None:
    """Require a value of every flag that takes one, and at most one flag about a pipeline's chunks. Raises
    InputError."""
    for name, value in args.items():
        if value is True and str(name).replace("_", "-") in _NUMBERS:
            raise InputError(f"--{name}", None, "has no value: is the command line cut short?", f"write --{name} N")
    given = [name for name in _VIRTUAL if args.get(name, args.get(name.replace("-", "_"))) is not None]
    if len(given) > 1:
        value = args.get(given[1], args.get(given[1].replace("-", "_")))
        reason = f"and --{given[0]} both say how many chunks a pipeline rank has"
        raise InputError(f"--{given[1]}", value, reason, "leave one of them out")


def _world(keys: Keys, flag: Callable[..., Any]) -> int | None:
    """Return the ranks that a launcher starts, or that the dump of a log says."""
    return keys.launched() or count(flag("world_size", "world"))


_DERIVED = {
    "data_parallel_size": "strategy.dp",
    "transformer_pipeline_model_parallel_size": "strategy.pp",
    "virtual_pipeline_model_parallel_size": "strategy.virtual",
}
"""Arguments that Megatron derives from the degrees and prints with them (validate_args)."""
_REPEATED = {"encoder_num_layers": "num_layers", "encoder_seq_length": "seq_length"}
_UNUSED = {
    "multi_latent_attention": ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "is_hybrid_model": ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
}
"""Sizes of parts that a model without them prints by their defaults."""


def _derived(flag: Callable[..., Any], args: Config) -> None:
    """Take arguments of a dump that repeat others, or that are sizes of parts which the model does not have."""
    for name, meaning in _DERIVED.items():
        flag(name, meaning)
    for name, other in _REPEATED.items():
        if args.get(name) == args.get(other):
            flag(name, "model")
    for part, names in _UNUSED.items():
        for name in () if truth(args.get(part)) else names:
            flag(name, "model")
