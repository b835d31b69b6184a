"""A plan as MaxText's YAML: on GPUs one process a node, whose GPUs are a slice; on TPUs one a host of a slice."""

import math
from typing import Any

from phalanx.frameworks.keys import key_table, optimizer_word
from phalanx.frameworks.writing import reasons
from phalanx.frameworks.writing.blanks import blanks
from phalanx.frameworks.writing.program import Group, TrainingProgram, Variable, group
from phalanx.frameworks.writing.subject import Subject, require_plain
from phalanx.frameworks.writing.yaml import document
from phalanx.spec.cluster.chips import jax_devices
from phalanx.spec.errors import InputError
from phalanx.spec.model.mechanisms import Experts, Latent
from phalanx.spec.model.spec import ModelSpec

KEYS = key_table("maxtext")
_AXES = ("tensor", "tensor_sequence", "expert", "context", "fsdp", "data", "pipeline")
"""Mesh axes from the innermost: the order in which they fill a node."""
_COORDINATED = 'export JAX_COORDINATOR_IP="$MASTER_ADDR" JAX_COORDINATOR_PORT="$MASTER_PORT" NNODES NODE_RANK\n'
"""Lines of a script for GPUs; hosts of a slice of TPUs need no coordinator."""
_START = (
    "exec python3 -m maxtext.trainers.pre_train.train config.yml run_name=phalanx \\\n"
    '  base_output_directory="$CHECKPOINTS" tokenizer_path="$TOKENIZER" hf_train_files="$DATA_PATH" \\\n'
    '  learning_rate="$LR" steps="$TRAIN_ITERS"'
)


def program(x: Subject) -> TrainingProgram:
    """Return a plan as config.yml. Raises InputError for what MaxText has no key or no model for."""
    _require_expressible(x)
    data = "files that Hugging Face's datasets reads, such as /data/*.parquet"
    variables: tuple[Variable, ...] = ()
    if x.options.document:
        why = "Mean tokens of a document, which the price assumes and no key states; phalanx read takes it."
        variables = (Variable("PHALANX_ASSUMES", f"document={x.options.document}", why),)
    parts = groups(x)
    head = f"{x.stack.title}: python3 -m maxtext.trainers.pre_train.train config.yml. train.sh adds the blanks."
    return TrainingProgram(
        x.stack.title,
        parts,
        _START if x.cluster.device.is_tpu else _COORDINATED + _START,
        variables,
        blanks(x, data, folder="checkpoints and logs"),
        {"config.yml": document(parts, head)},
    )


def _require_expressible(x: Subject) -> None:
    s, o = x.s, x.options
    require_plain(x.model, x.stack.title)
    _require_model(x.model)
    if s.pp > 1 and _piped(x) % s.pp:
        reason = f"{_piped(x)} blocks do not divide over {s.pp} stages"
        raise InputError("strategy.pp", s.pp, reason, "use another pp")
    if x.compute == "fp16":
        raise InputError("job.precision.compute", "float16", "MaxText has no loss scale", "use bfloat16")
    if o.mtp and x.model.latent is None:
        raise InputError("options.mtp", o.mtp, "is there for the deepseek block alone", "leave it out")
    _, block = KEYS.setting("model.family", x.model.family)
    if o.optimizer == "muon" and block not in _MUON:
        reason = f"MaxText runs Muon on its blocks {', '.join(_MUON)}; the model's is {block}"
        raise InputError("options.optimizer", "muon", reason, "use adam")
    passed = s.micro_batch * s.dp * (x.micro_batches if s.pp > 1 else 1)
    if int(s.world * _devices(x) * float(f"{_per_device(x):.12g}")) != passed:
        reason = f"per_device_batch_size = {_per_device(x):.12g} is not an exact share of a batch"
        raise InputError("strategy.micro_batch", s.micro_batch, reason, "use degrees that are powers of 2")


_MUON = ("deepseek", "qwen3", "llama2")
"""Kinds of exported blocks whose shapes Muon knows (types.py:4250)."""


def _require_model(m: ModelSpec) -> None:
    families = KEYS.values("model.family")
    if m.family not in families:
        raise InputError("model.family", m.family, "is not exported to MaxText", f"use {', '.join(families)}")
    _, block = KEYS.setting("model.family", m.family)
    for field, ok in (
        ("window", m.window is None or m.window >= m.max_seq),
        ("rope_scaling", m.rope_scaling is None or (m.latent is not None and m.rope_scaling.kind == "yarn")),
        ("rope_theta", m.rope_theta == int(m.rope_theta)),
        ("rotary_dim", m.rotary_dim is None),
        ("qkv_bias", m.qkv_bias == (m.family == "qwen2")),
        ("out_bias", not m.out_bias),
        ("mlp_bias", not m.mlp_bias),
        ("experts", m.experts is None or _has_experts(m, m.experts)),
    ):
        if not ok:
            reason = f"MaxText's {block} block has no key for it"
            raise InputError(f"model.{field}", None, reason, "use another model")


def _has_experts(m: ModelSpec, x: Experts) -> bool:
    first = len(x.dense_layers)
    led = set(x.dense_layers) == set(range(first))
    latent = m.latent is not None
    return (
        led
        and x.chooser == "tokens"
        and x.z_loss == 0
        and x.capacity is None
        and not (x.bias or x.router_bias)
        and (latent or (first == 0 and not x.shared_ffn and x.score == "softmax" and x.normalized and x.groups == 1))
        and (not latent or (x.score == "sigmoid" and x.normalized and x.shared_ffn % x.ffn == 0))
        and (latent or m.ffn == x.ffn or m.family == "qwen3_moe")
    )


def _piped(x: Subject) -> int:
    """Return the number of blocks in the pipeline: all, but of DeepSeek's models only blocks with experts."""
    dense = len(x.model.experts.dense_layers) if x.model.experts and x.model.latent else 0
    return x.model.layers - dense


def _per_device(x: Subject) -> float:
    """Return the sequences of a forward pass per device; a pipeline takes all micro-batches in one pass."""
    return x.s.micro_batch * x.s.dp * (x.micro_batches if x.s.pp > 1 else 1) / (x.s.world * _devices(x))


def _devices(x: Subject) -> int:
    """Return the devices that JAX sees of a rank."""
    return jax_devices(x.cluster.device)


def groups(x: Subject) -> tuple[Group, ...]:
    """Return all keys, group by group."""
    m = x.model
    result = [
        group(
            "Base",
            "MaxText's defaults for all that is not below.",
            {"base_config": "base.yml", "hardware": "tpu" if x.cluster.device.is_tpu else "gpu"},
        ),
        group("Model", f"{m.family}, {m.parameter_count:,} parameters.", _model(m)),
        group(
            "Layout",
            f"{reasons.layout(x)} {reasons.tensor(x)} {reasons.context(x)} {reasons.data(x)} "
            "ici: inside a node; dcn: between nodes.",
            _degrees(x),
        ),
    ]
    if x.s.pp > 1:
        result.append(group("Pipeline", reasons.pipeline(x), _pipeline(x)))
    if m.experts is not None:
        result.append(group("Experts", reasons.experts(x), _experts(m, m.experts)))
    return (
        *result,
        group("Batch", reasons.batch(x), _batch(x)),
        group("Memory", reasons.recomputation(x), _memory(x)),
        group("Number types", reasons.precision(x), _types(x)),
        group(
            "Optimizer", "As the plan's job has it; learning rate and steps are blanks of train.sh.", _optimizer(x)
        ),
        group(
            "Data",
            "Files and tokenizer are blanks of train.sh.",
            {"dataset_type": "hf", "hf_path": "parquet", "tokenizer_type": "huggingface", "enable_dropout": False}
            | {"data_shuffle_seed": x.training.seed or 0, "checkpoint_period": x.training.save_every or 1000},
        ),
    )


def _model(m: ModelSpec) -> dict[str, Any]:
    names = ["hidden", "ffn", "layers", "heads", "kv_heads", "vocab", "norm_eps", "tied", "qk_norm", "qkv_bias"]
    names += ["head_dim"] if m.latent is None else []
    return (
        KEYS.write({"model.family": m.family} | {f"model.{name}": getattr(m, name) for name in names})
        | {"mlp_activations": ["silu", "linear"], "normalize_embedding_logits": False}
        | {"rope_max_timescale": int(m.rope_theta)}
        | (_latent(m, m.latent) if m.latent is not None else {})
    )


def _latent(m: ModelSpec, x: Latent) -> dict[str, Any]:
    table: dict[str, Any] = {"attention_type": "mla"}
    table |= {key: getattr(x, name) or 0 for name, key in KEYS.fields("model.latent").items()}
    r = m.rope_scaling
    if r is None:
        return table | {"rope_type": "default"}
    return table | {
        "rope_type": "yarn",
        "max_position_embeddings": m.max_seq,
        "original_max_position_embeddings": int(r.original_max_seq or m.max_seq),
        "rope_factor": int(r.factor),
        "beta_fast": int(r.beta_fast),
        "beta_slow": int(r.beta_slow),
        "mscale": float(r.mscale_all_dim or 1.0),
    }


def _degrees(x: Subject) -> dict[str, Any]:
    """Return the degrees of the axes inside and between nodes: from the innermost, each takes GPUs of a node that are
    left."""
    s = x.s
    shards = s.dp_shard if s.level.parameters else 1
    degrees = {"tensor_sequence": s.tp, "expert": s.ep, "context": s.cp, "pipeline": s.pp}
    degrees |= {"fsdp": shards // s.ep, "data": s.dp // shards}
    degrees["fsdp" if s.level.parameters else "data"] *= _devices(x)
    table: dict[str, Any] = {"num_slices": x.nodes}
    left = x.gpus_per_node * _devices(x)
    for axis in _AXES:
        degree = degrees.get(axis, 1)
        inside = math.gcd(degree, left)
        left //= inside
        table |= {f"ici_{axis}_parallelism": inside, f"dcn_{axis}_parallelism": degree // inside}
    if left > 1:
        raise InputError(
            "strategy", str(s), f"its axes do not fill nodes of {x.gpus_per_node} GPUs", "use other degrees"
        )
    table["shard_optimizer_over_data"] = s.level.state and not s.level.gradients
    if s.cp > 1 and x.options.context != "auto":
        table |= KEYS.write({"options.context": x.options.context})
    return table


def _pipeline(x: Subject) -> dict[str, Any]:
    return {
        "num_layers_per_pipeline_stage": _piped(x) // x.s.pp,
        "num_pipeline_repeats": 1,
        "num_pipeline_microbatches": x.micro_batches,
    }


def _experts(m: ModelSpec, x: Experts) -> dict[str, Any]:
    names = ("count", "top_k", "ffn", "balance_loss")
    table = KEYS.write({f"model.experts.{name}": getattr(x, name) for name in names})
    if m.latent is None:
        return table | {"norm_topk_prob": m.family == "qwen3_moe"}
    return table | {
        KEYS["model.experts.dense_layers"]: len(x.dense_layers),
        "shared_experts": x.shared_ffn // x.ffn,
        "routed_scaling_factor": x.scale,
        "routed_score_func": x.score,
        "routed_bias": x.balance_bias is not None,
        "routed_bias_update_rate": x.balance_bias or 0.0,
        "n_routing_groups": x.groups if x.groups > 1 else -1,
        "topk_routing_group": x.top_groups if x.groups > 1 else -1,
    }


def _batch(x: Subject) -> dict[str, Any]:
    table: dict[str, Any] = {
        KEYS["job.seq"]: x.job.seq,
        "per_device_batch_size": _per_device(x),
        "gradient_accumulation_steps": 1 if x.s.pp > 1 else x.micro_batches,
        "packing": x.options.document > 0,
    }
    if x.options.document:  # Transformer Engine's attention asks for a bound
        table["max_segments_per_seq"] = 4 * math.ceil(x.job.seq / x.options.document)
    if x.options.mtp:
        table[KEYS["options.mtp"]] = x.options.mtp
    return table


def _memory(x: Subject) -> dict[str, Any]:
    o = x.options
    table = KEYS.write(
        {
            "strategy.recompute": x.s.recompute,
            "options.optimizer_offload": o.optimizer_offload == 1,
            "options.parameter_offload": o.parameter_offload,
        }
    )
    if o.attention != "auto":
        flash = x.cluster.device.is_tpu and o.attention == "flash"  # the others are GPUs' libraries
        table |= {KEYS["options.attention"]: "flash"} if flash else KEYS.write({"options.attention": o.attention})
    if o.cross_entropy != "auto":
        table[KEYS["options.cross_entropy"]] = _tiles(x) if o.cross_entropy == "linear" else 1
    return table


def _tiles(x: Subject) -> int:
    """Return the number of parts in which the loss is computed: a divisor of a GPU's tokens, 8 at most."""
    tokens = _per_device(x) * x.job.seq
    tiles = next((n for n in (8, 4, 2) if tokens % n == 0), 1)
    if tiles == 1:
        reason = f"{tokens:g} tokens of a GPU do not divide"
        raise InputError("options.cross_entropy", "linear", reason, "use another micro_batch")
    return tiles


def _types(x: Subject) -> dict[str, Any]:
    o = x.options
    stated = {"options.products": o.products, "options.first_moment": o.first_moment}
    return (
        KEYS.write({"job.precision": x.compute})
        | {"weight_dtype": "float32"}
        | ({"matmul_precision": "float32"} if x.compute == "fp32" and not x.rounded else {})
        | KEYS.write({name: value for name, value in stated.items() if value != "auto"})
    )


def _optimizer(x: Subject) -> dict[str, Any]:
    a, t = x.optimizer, x.training
    table: dict[str, Any] = {
        KEYS["job.optimizer.name"]: optimizer_word(KEYS, a.name, "MaxText"),
        KEYS["job.optimizer.betas.0"]: a.betas[0],
        KEYS["job.optimizer.betas.1"]: a.betas[1],
        KEYS["job.optimizer.eps"]: a.eps,
        KEYS["job.optimizer.weight_decay"]: a.weight_decay,
        KEYS["job.clip"]: x.job.clip or 0.0,
        "lr_schedule_type": "cosine",
        "learning_rate_final_fraction": x.final_lr_share,
        "warmup_steps_fraction": t.warmup / t.steps if t.warmup and t.steps else 0.0,
    }
    return table | ({"muon_weight_decay": a.weight_decay, "muon_beta": a.first_decay} if a.row.whole else {})
