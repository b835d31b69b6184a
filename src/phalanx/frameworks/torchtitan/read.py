"""torchtitan's configuration: TOML to 0.2, YAML of its forks, flags and Python since 0.3 (config/configs.py).

0.3.0 counts a batch in sequences, later commits in tokens (`num_tokens_per_microbatch_per_dp_rank`)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, Partial, StatedLayout
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.torchtitan.models import PRESETS
from phalanx.frameworks.values import count, divided, number, product, truth
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.spec import ModelSpec

KEYS = key_table("torchtitan")
_UNSAID = "compile is left open: 0.3 with compiled blocks is taken; torchtitan-eager prices them one by one"
_UNMIXED = "no FSDP: a release before 0.3 trains tp or pp alone in fp32"
"""v0.2.2, torchtitan/distributed/utils.py:253 (maybe_enable_amp); from 0.3 on fully_shard always sets the types
(b5bcd76, torchtitan/models/llama3/parallelize.py:53)."""
SCHEDULE_FILE = ("parallelism.pipeline_parallel_schedule_csv", "experimental.pipeline_parallel_schedule_csv")
"""Keys of a file of a pipeline's actions, which replaces the named schedule; the second is of releases to 2025."""
_CONVERTERS = {"float8": "float8", "quantize.linear.float8": "float8", "mx": "mxfp8", "quantize.linear.mx": "mxfp8"}
"""Names of converters to 0.2 (components/quantization/{float8,mx}.py); a file has one, a list, or a text with
commas."""
_EIGHT, _SWITCH = "options.products", "float8.enable_float8_linear"
_ATTENTION = {"flex": "flex", "varlen": "flash3", "sdpa": "flash2"}
"""Attention's kernel by attn_backend, since 0.3 (b5bcd76, torchtitan/models/common/attention.py)."""
_FLEX_MODULES, _SPARSE_MODULES = ("deepseek_v3", "gpt_oss", "llama4"), ("deepseek_v3", "gpt_oss", "llama4", "kimi")
"""Modules whose flavors have FlexAttention in releases before 0.3 too, deepseek_v3's since 22 August 2025 (f738a03,
torchtitan/models/deepseek_v3/__init__.py); and modules whose every flavor has experts."""
_RECOMPUTED = {"FullAC": "full", "SelectiveAC": "selective", "NoAC": "none"}


def read(config: Config, world: int | None = None) -> Configuration:
    """Read torchtitan's tables. A shard degree of -1 takes what the other degrees leave of the world."""
    keys = Keys(config, KEYS)
    p = "parallelism"

    def degree(field: str, name: str, *old: str) -> int | None:
        return keys.count((f"{p}.{name}", *(f"{table}.{name}" for table in old)), f"strategy.{field}", 1)

    tp = degree("tp", "tensor_parallel_degree", "training")
    pp = degree("pp", "pipeline_parallel_degree", "experimental", "training")
    cp = degree("cp", "context_parallel_degree", "experimental")
    ep = degree("ep", "expert_parallel_degree")
    replicas = degree("dp", "data_parallel_replicate_degree", "training")
    stated_degrees = [n for n in (tp, pp, cp, replicas) if n is not None]
    if isinstance(config, Partial) and world is not None and math.prod(stated_degrees) == world:
        tp, pp, cp, replicas = tp or 1, pp or 1, cp or 1, replicas or 1  # nothing is left for the others
    shard_paths = (
        f"{p}.data_parallel_shard_degree",
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",  # of 2024
    )
    stated = keys.take(shard_paths, "strategy.shard", -1)
    shards = count(stated)
    if shards is None and world:
        shards = divided(world, product(tp, pp, cp, replicas))
    dp = product(replicas, shards)
    seq = keys.count(("training.seq_len", "training.max_context_length"), "job.seq")
    micro, whole = _batch(keys, seq)
    offload = keys.truth("training.enable_cpu_offload", "offload")
    mode = keys.take("activation_checkpoint.mode", "strategy.recompute")
    recompute_class = str(
        keys.take("activation_checkpoint.class", "strategy.recompute", "") or ""
    )  # of a 0.3 registry
    if mode is None:
        none = "activation_checkpoint" in config and config["activation_checkpoint"] is None
        default = "none" if none else None if isinstance(config, Partial) else "selective"
        mode = next((word for name, word in _RECOMPUTED.items() if recompute_class.startswith(name)), default)
        keys.take("activation_checkpoint", "strategy.recompute") if none else None
    schedule = keys.take(
        (f"{p}.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule"), "strategy.schedule"
    )
    actions = keys.take(SCHEDULE_FILE, "strategy.schedule")  # of a file, in place of a named schedule
    kept = str(keys.field("strategy.zero", "default"))
    whole_model = shards == 1 and (cp or 1) == 1 and not offload  # which is of shards, though one has all
    blocks = _blocks(keys.field("strategy.layers"))
    even, v_shaped = len(set(blocks)) <= 1, str(schedule).lower() in ("zbvzerobubble", "dualpipev")
    layout = StatedLayout(
        world=world or product(tp, pp, cp, dp),
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=keys.count(f"{p}.expert_tensor_parallel_degree", "strategy.etp"),
        zero=0 if whole_model else 2 if kept == "never" else 3 if shards else None,
        shard=shards,
        sp=truth(keys.field("strategy.sp", True)) and (tp or 1) > 1,
        virtual=len(blocks) // pp if blocks and pp and not v_shaped else None,
        schedule=str(actions) if actions else KEYS.value("strategy.schedule", schedule),
        layers=None if even else "/".join(map(str, blocks)),
        micro_batch=micro,
        accumulation=divided(whole, product(micro, dp)),
        global_batch=whole,
        seq=seq,
        recompute=str(mode) if mode in ("none", "selective", "full") else None,
        offload={"param": "cpu", "optimizer": "cpu"} if offload else None,
    )
    name = " ".join(str(keys.take(f"model.{n}", "model", "") or "") for n in ("name", "flavor")).strip()
    spec, inside = _model(keys)
    if spec and seq and seq > spec.max_seq:  # positions grow: models/llama3/model/args.py, update_from_config
        spec = replace(spec, max_seq=seq)
    options = _options(keys, bool(offload)) | inside
    job, fields = _job(keys) | _types(keys), _pieces(keys, micro, pp or 1) | _block_interval(keys, mode)
    stack, why = _release(keys, str(options.get("products", "")).startswith("float8"))
    early = "job" in config  # a release before 0.3
    unmixed = ""
    if early and whole_model and (replicas or 1) == 1 and product(tp, pp) not in (None, 1):
        job["compute"], unmixed = "fp32", _UNMIXED
    if stack == "torchtitan-eager" and "loss" in why:
        options["cross_entropy"] = "fused"
    if stack != "torchtitan" and (tp or 1) > 1:  # only the compiler's "async TP" overlaps collectives
        options.setdefault("tp_overlap", "none")
    return keys.configuration(
        "torchtitan",
        stack,
        layout,
        model_name=name,
        spec=spec,
        options=options,
        fields=fields,
        job=job,
        notes=tuple(filter(None, (why, _idle(keys), unmixed))),
        within="dp*cp>1" if early and (world or 2) > 1 else "",
    )


def _idle(keys: Keys) -> str:
    """Return a note where a table configures products of 8 bits and no converter is named, so that it has no effect;
    "" otherwise."""
    if keys.take(("model_spec.converters", "model.converters"), _EIGHT) or keys.truth(_SWITCH, _EIGHT):
        return ""
    tables = [name for name in ("float8", "quantize") if keys.take(name, _EIGHT)]
    return f"[{tables[0]}] does nothing: model.converters names no converter to 8 bits" if tables else ""


def _types(keys: Keys) -> dict[str, Any]:
    """Return the types (fields of Precision) of weights, gradients and moments, and of reductions, where they are not
    float32. The model is made in training.dtype (v0.2.0, torchtitan/train.py, `set_default_dtype`), so AdamW's
    moments have that type too; FSDP reduces in mixed_precision_reduce."""
    types: dict[str, str] = {}
    for name, parts in (("dtype", ("accumulate", "master")), ("mixed_precision_reduce", ("reduce",))):
        path = f"training.{name}"
        if (word := keys.take(path, "job.precision")) == "bfloat16":
            types |= dict.fromkeys(parts, "bfloat16")
        elif word != "float32":
            keys.understood.pop(path, None)  # has no price
    return {"types": types} if types else {}


def _release(keys: Keys, eight: bool) -> tuple[str, str]:
    """Return the stack of a configuration with the reason: by keys that only some releases have, and by what is
    compiled. To 0.2 nothing is unless a key says so (config/job_config.py), and with `components` only these.
    `eight`: whether products are in 8 bits."""
    before = keys.take("training.compile", "stack")  # to August 2025
    enabled = truth(before if before is not None else keys.take("compile.enable", "stack"))
    components = keys.take("compile.components", "stack")
    parts = components if isinstance(components, list) else ["model", "loss"]
    old, narrow = "job" in keys.config, "enable_fsdp_float8_all_gather"
    gathers = [keys.truth(f"{table}.{narrow}", "stack") for table in ("float8", "quantize.linear.float8")]
    if enabled is False or (enabled is None and old):
        said = "compile is false" if enabled is False else "compile is left open, which is false"
        return "torchtitan-eager", f"{said}: priced as torchtitan-eager, whose kernels run one by one"
    if enabled and "model" not in parts:
        return "torchtitan-eager", "only the loss is compiled: priced as torchtitan-eager with a fused loss"
    if enabled and eight and any(gathers):
        return "torchtitan-narrow-gather", "parameters are gathered in 8 bits: priced as torchtitan-narrow-gather"
    if before is not None:
        return "torchtitan-compiled", "training.compile is of a release to August 2025: priced as torchtitan-compiled"
    if old:
        return "torchtitan-2025-06", "[job] is of a release before 0.3: priced as torchtitan-2025-06"
    return "torchtitan", _UNSAID if enabled is None else ""


def _batch(keys: Keys, seq: int | None) -> tuple[int | None, int | None]:
    """Return (sequences of a replica's local batch, of a step)."""
    micro = keys.count(("training.local_batch_size", "training.batch_size"), "strategy.micro_batch")
    whole = count(keys.field("job.global_batch"))
    tokens = keys.count("training.num_tokens_per_microbatch_per_dp_rank", "strategy.micro_batch")
    step = keys.count("training.num_tokens_per_train_step", "job.global_batch")
    return micro or divided(tokens, seq), whole or divided(step, seq)


def _pieces(keys: Keys, local: int | None, pp: int) -> dict[str, Any]:
    """Return the field `micro_batch` of a pipeline, which divides the local batch into single sequences by
    default."""
    size = keys.count("parallelism.pipeline_parallel_microbatch_size", "strategy.micro_batch", 1)
    old = ("parallelism.pipeline_parallel_microbatches", "experimental.pipeline_parallel_microbatches")
    if (number_of := keys.count(old, "strategy.micro_batch")) is not None:
        size = divided(local, number_of)
    return {"micro_batch": size} if pp > 1 and local and size and local % size == 0 else {}


def _block_interval(keys: Keys, mode: Any) -> dict[str, Any]:
    """Return the field `recompute` where `selective` means every n-th block (to 0.2) rather than single operators."""
    n = keys.count("activation_checkpoint.selective_ac_option", "strategy.recompute", "op")
    return {"recompute": "full" if n == 1 else f"every:{n}"} if n and mode == "selective" else {}


def _blocks(parts: Any) -> tuple[int, ...]:
    """Return the blocks of each chunk, by a list of the modules of each; () without such a list."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        return ()
    return tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)


def _model(keys: Keys) -> tuple[ModelSpec | None, dict[str, Any]]:
    """Return the model of a known module and flavor, and the options that its tables and converters set."""
    module = keys.take(("model_spec.module", "model.name"), "model")
    flavor = keys.take(("model_spec.flavor", "model.flavor"), "model")
    preset = PRESETS.get((str(module), str(flavor)))
    spec = make_model({"preset": preset}, Path())[0] if preset else None
    options: dict[str, Any] = {}
    if depths := keys.count("model_spec.num_mtp_layers", "options.mtp"):
        options["mtp"] = depths
    backend = keys.take("model_spec.moe_comm_backend", "options.dispatch")
    if backend in ("deepep", "hybridep"):
        options["dispatch"] = backend
    kernel = _ATTENTION.get(str(keys.take("model_spec.attn_backend", "options.attention")))
    if kernel or ("job" in keys.config and module in _FLEX_MODULES):
        options["attention"] = kernel or "flex"
    balanced = keys.take(("debug.moe_force_load_balance", "training.debug_moe_force_load_balance"), "options.routing")
    sparse = spec.experts is not None if spec else str(module).startswith(_SPARSE_MODULES)
    if sparse:
        options["routing"] = "balanced" if truth(balanced) else "learned"
    converters = keys.take(("model_spec.converters", "model.converters"), _EIGHT)
    if isinstance(converters, str):
        converters = [name.strip() for name in converters.split(",")]
    converters = converters if isinstance(converters, list) else []
    named = [_CONVERTERS[name] for name in converters if isinstance(name, str) and name in _CONVERTERS]
    if keys.truth(_SWITCH, _EIGHT) or "float8" in named:
        recipe = keys.take(("float8.recipe_name", "quantize.linear.float8.recipe_name"), _EIGHT)
        options["products"] = "float8-block" if str(recipe).startswith("rowwise") else "float8"
    elif named:
        options["products"] = named[0]
    for converter in converters:
        name = str(converter.get("converter", "") if isinstance(converter, Mapping) else converter).partition(".")[0]
        if products := KEYS.value(_EIGHT, name):
            options["products"] = products
        if name == "LoRAConverter" and isinstance(converter, Mapping):
            options["lora"] = count(converter.get("rank")) or 8
    return spec, options


def _options(keys: Keys, offload: bool) -> dict[str, Any]:
    """Return the options that other tables set."""
    options: dict[str, Any] = {"parameter_offload": True, "optimizer_offload": 1.0} if offload else {}
    overlapped = ("compile.enable_async_tensor_parallel", "parallelism.enable_async_tensor_parallel")
    if keys.truth(overlapped, "options.tp_overlap"):
        options["tp_overlap"] = "async"
    return options


def _job(keys: Keys) -> dict[str, Any]:
    """Return optimizer, clipping and type; the defaults are AdamW with 0.9 and 0.95, decay 0.1, norm 1."""
    betas = keys.take("optimizer.betas", "job.optimizer.betas")
    if not (isinstance(betas, list) and len(betas) == 2):
        named = ("optimizer.beta1", 0.9), ("optimizer.beta2", 0.95)
        betas = [keys.number(n, "job.optimizer.betas", d) for n, d in named]
    optimizer = {
        "betas": tuple(number(b, 0.9) for b in betas),
        "eps": keys.number("optimizer.eps", "job.optimizer.eps", 1e-8),
        "weight_decay": keys.number("optimizer.weight_decay", "job.optimizer.weight_decay", 0.1),
    }
    type_ = keys.word("job.precision") or "bf16"
    return {"optimizer": optimizer, "clip": number(keys.field("job.clip"), 1.0), "compute": type_}
