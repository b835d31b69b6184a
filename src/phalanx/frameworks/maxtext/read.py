"""MaxText's YAML or its overrides on a command line (maxtext/configs/types.py): a degree per axis, inside a slice
(ici) and between slices (dcn); -1 takes the devices that the other axes leave.

MaxText counts a batch per device: each of the tp x cp x pp devices of a replica has a part of its micro-batch, and a
pipeline takes all micro-batches of a step at once. Expert parallelism is an axis of its own, over which parameters
shard as over fsdp: dp = data x fsdp x expert.
"""

import math
from dataclasses import asdict
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, Partial, StatedLayout
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.maxtext import remat
from phalanx.frameworks.values import count, divided, number, product, truth
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.mechanisms import MOST_LAYERS, Experts, Latent, RopeScaling
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy import stack_options
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

KEYS = key_table("maxtext")
_EXACT = ("float32", "highest")
"""Words of `matmul_precision` with which JAX multiplies fp32 unchanged, not in TF32 (docs.jax.dev, precision)."""
_AXES = {
    "tp": ("tensor", "tensor_transpose", "tensor_sequence"),
    "pp": ("pipeline",),
    "cp": ("context", "context_autoregressive"),
    "ep": ("expert",),
    "fsdp": ("fsdp", "fsdp_transpose"),
    "data": ("data",),
    "sequence": ("sequence",),
    "autoregressive": ("autoregressive",),
}
_PRODUCTS = {
    "fp8": "float8-delayed", "fp8_full": "float8-delayed", "fp8_gpu": "float8", "nanoo_fp8": "float8",
}  # fmt: skip
"""Words of `quantization` beyond the words of the stack's facts; others are of integers, or of weights alone."""


def read(config: Config, world: int | None = None) -> Configuration:
    """Read MaxText's tables. An axis that is not named has degree 1, and fsdp the devices that are left. Every tensor
    axis splits the residual stream, over tokens or over features (activation_embed,
    src/maxtext/configs/base.yml:598).
    """
    keys = Keys(config, KEYS)
    degrees = _degrees(keys, world)
    keys.take("num_slices", "strategy.dp")  # which the degrees over dcn say too
    fsdp, data, ep, cp = (degrees[axis] for axis in ("fsdp", "data", "ep", "cp"))
    stated = any(f"{where}_fsdp_parallelism" in config for where in ("ici", "dcn"))
    world = world or (product(*degrees.values()) if stated else None)
    dp = fsdp * data if fsdp is not None and data is not None and world else None
    replicas = product(dp, ep)
    shards = product(fsdp, ep)
    over_data = keys.truth("shard_optimizer_over_data", "strategy.zero")
    zero = None if not dp else 3 if (shards or 1) > 1 or (cp or 1) > 1 else 1 if over_data else 0
    micro, steps, whole = _batch(keys, world, replicas, degrees["pp"] or 1)
    word = keys.field("strategy.recompute") or (None if isinstance(config, Partial) else "full")  # types:1292
    policy, notes = remat.policy(keys, None if word is None else str(word))
    seq = count(keys.field("job.seq"))
    type_ = keys.word("job.precision")
    rounded = keys.take("matmul_precision", "job.precision") not in _EXACT
    layout = StatedLayout(
        world=world,
        dp=dp,
        tp=degrees["tp"],
        pp=degrees["pp"],
        cp=cp,
        ep=ep,
        zero=zero,
        sp=None if degrees["tp"] is None else degrees["tp"] > 1,
        shard=shards if zero and ZERO_LEVELS[zero].parameters and shards != replicas else None,
        schedule="gpipe" if (degrees["pp"] or 1) > 1 else None,
        micro_batch=micro,
        accumulation=steps,
        global_batch=whole,
        seq=seq,
        precision=type_,
        recompute=None if word is None else str(word),
        recomputed=KEYS.value("strategy.recompute", policy),
    )
    name = str(keys.field("model.name", "") or "")
    spec, why = _model(keys, seq)
    if spec is not None and not any(KEYS[size] in config for size in _NAMED_SIZES):
        notes += ("the file's model is MaxText's default: it names none",)
    options, job = _options(keys, cp), _job(keys)
    return keys.configuration(
        "maxtext",
        "maxtext",
        layout,
        model_name=KEYS.value("model.name", name) or name,
        spec=spec,
        open_model=why,
        options=options,
        notes=notes,
        job=job | ({"compute": "tf32" if type_ == "fp32" and rounded else type_} if type_ else {}),
    )


def _degrees(keys: Keys, world: int | None) -> dict[str, int | None]:
    degrees: dict[str, int | None] = {}
    for axis, names in _AXES.items():
        paths = [f"{where}_{name}_parallelism" for where in ("ici", "dcn") for name in names]
        counted = [count(keys.take(path, f"strategy.{axis}", _remaining_degree(keys, path))) for path in paths]
        degrees[axis] = None if None in counted else math.prod(c for c in counted if c is not None)
    open_ = [axis for axis, degree in degrees.items() if degree is None]
    if world and len(open_) == 1 and open_[0] in ("fsdp", "data"):
        degrees[open_[0]] = divided(world, product(*(d for a, d in degrees.items() if a != open_[0])))
    return degrees


def _remaining_degree(keys: Keys, path: str) -> int:
    """Return the degree of an axis that a file does not name: -1 of fsdp, which takes the rest of a slice
    (types:1246) unless data does; else 1."""
    return -1 if path == "ici_fsdp_parallelism" and keys.config.get("ici_data_parallelism") != -1 else 1


def _batch(keys: Keys, world: int | None, replicas: int | None, pp: int) -> tuple[int | None, int | None, int | None]:
    """Return (sequences of a micro-batch, micro-batches of a step, sequences of a step)."""
    each = number(keys.field("strategy.micro_batch"), 0.0)
    steps = count(keys.field("accumulation"))
    pieces = keys.count("num_pipeline_microbatches", "accumulation")
    keys.field("strategy.layers")
    keys.field("strategy.virtual")
    if not world or not replicas:
        return count(each), steps, None
    of_replica = each * world / replicas
    micro = int(of_replica) if of_replica and of_replica.is_integer() else None
    if pp > 1 and pieces and micro and micro % pieces == 0:
        micro, steps = micro // pieces, (steps or 1) * pieces
    return micro, steps, product(micro, steps or 1, replicas)


def _options(keys: Keys, cp: int | None) -> dict[str, Any]:
    """Return the options of the stack."""
    assumed = keys.take("env.PHALANX_ASSUMES", "options")  # of the data, which no key states
    options: dict[str, Any] = stack_options.parse(str(assumed)) if assumed else {}
    options["products"] = keys.word("options.products") or _PRODUCTS.get(str(keys.field("options.products")))
    options["first_moment"] = keys.word("options.first_moment")
    if truth(keys.field("options.optimizer_offload")):
        options["optimizer_offload"] = 1.0
    if truth(keys.field("options.parameter_offload")):
        options["parameter_offload"] = True
    if (context := keys.word("options.context")) is not None and cp and cp > 1:
        options["context"] = context
    if (core := keys.word("options.attention")) is not None:
        options["attention"] = core
    if (tiles := count(keys.field("options.cross_entropy"))) is not None:
        options["cross_entropy"] = "linear" if tiles > 1 else "plain"
    if keys.take(KEYS["job.optimizer.name"], "job.optimizer") == "muon":
        options["optimizer"] = "muon"
    options["mtp"] = count(keys.field("options.mtp"))
    keys.take("packing", "options.document")
    return {name: value for name, value in options.items() if value}


def _job(keys: Keys) -> dict[str, Any]:
    """Return optimizer and clipping; the defaults are AdamW with 0.9 and 0.95, decay 0.1, norm 1 (base.yml)."""

    def of(field: str, default: float) -> float:
        return number(keys.field(field), default)

    return {
        "optimizer": {
            "betas": (of("job.optimizer.betas.0", 0.9), of("job.optimizer.betas.1", 0.95)),
            "eps": of("job.optimizer.eps", 1e-8),
            "weight_decay": of("job.optimizer.weight_decay", 0.1),
        },
        "clip": of("job.clip", 1.0),
    }


_DEFAULT_SIZES = {
    "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 7168, "layers": 16, "head_dim": 128, "vocab": 32_000,
}  # fmt: skip
"""Sizes of the model where a file names none (types:516, types:1370)."""
_NAMED_SIZES = ("model.hidden", "model.layers", "model.ffn")
_DOUBLED = (("heads", "kv_heads", "ffn"), ("hidden",), ("layers",))
"""Sizes that `global_parameter_scale` doubles, one group after the other."""


def _sizes(keys: Keys) -> dict[str, Any]:
    """Return the sizes of the model, of the file or by default. `global_parameter_scale` of 2^n doubles n groups of
    them (types:2854)."""
    named = keys.field("model.name", "default") not in ("default", None)
    sizes = {n: keys.field(f"model.{n}", None if named else default) for n, default in _DEFAULT_SIZES.items()}
    doublings = (keys.count("global_parameter_scale", "model", 1) or 1).bit_length() - 1
    for turn, names in enumerate(_DOUBLED):
        for name in names:
            if type(sizes[name]) is int:
                sizes[name] <<= (doublings + 2 - turn) // 3
    return sizes


def _model(keys: Keys, seq: int | None) -> tuple[ModelSpec | None, str]:
    """Return the model of a file that states its sizes, or None with the reason ("" where it states none)."""
    family = keys.word("model.family", "llama")
    names = ("norm_eps", "qk_norm", "tied", "qkv_bias")
    sizes = _sizes(keys) | {n: keys.field(f"model.{n}") for n in names}
    if family is None or any(sizes[n] is None for n in _DEFAULT_SIZES):
        return None, ""
    theta = keys.take("rope_max_timescale", "model.rope_theta")
    fields: dict[str, Any] = {n: v for n, v in sizes.items() if v is not None}
    fields |= {"rope_theta": number(theta, 10_000.0), "norm_eps": number(sizes["norm_eps"], 1e-6)}
    longest = keys.count("max_position_embeddings", "model.max_seq")
    latent = _latent(keys) if str(keys.take("attention_type", "model.latent", "")) == "mla" else None
    experts = _experts(keys, latent is not None)
    if latent is not None:
        scaling = _scaling(keys)
        fields |= {"head_dim": latent.nope_dim + latent.rope_dim, "rope_scaling": scaling and asdict(scaling)}
        family = "deepseek_v3" if experts is not None and experts.score == "sigmoid" else "deepseek_v2"
    fields |= {"experts": experts and asdict(experts), "latent": latent and asdict(latent)}
    fields |= {"family": family, "max_seq": longest or seq or 1}
    try:
        return build(ModelSpec, complete(fields), "model"), ""
    except (InputError, TypeError) as error:
        return None, f"the sizes of its model cannot be read: {error}"


def _latent(keys: Keys) -> Latent:
    rank, *others = (
        keys.count(KEYS[f"model.latent.{n}"], "model.latent")
        for n in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")
    )
    kv, nope, rope, v = (n or 1 for n in others)
    return Latent(kv, nope, rope, v, rank)


def _scaling(keys: Keys) -> RopeScaling | None:
    if keys.take("rope_type", "model.rope_scaling") != "yarn":
        return None
    named = {"factor": "rope_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "mscale_all_dim": "mscale"}
    values = {n: keys.number(key, "model.rope_scaling", 1.0) for n, key in named.items()}
    first = keys.count("original_max_position_embeddings", "model.rope_scaling") or 4096
    return RopeScaling(**values, kind="yarn", original_max_seq=first, attention_factor=1.0)  # type: ignore[arg-type]


def _experts(keys: Keys, latent: bool) -> Experts | None:
    number_of = keys.count(KEYS["model.experts.count"], "model.experts")
    if number_of is None or number_of == 1:
        return None

    def of(name: str, default: Any = None) -> Any:
        return keys.take(name, "model.experts", default)

    ffn = count(of(KEYS["model.experts.ffn"])) or 1
    top = count(of(KEYS["model.experts.top_k"])) or 1
    loss = number(of(KEYS["model.experts.balance_loss"]), 0.0)
    if not latent:
        of("norm_topk_prob")
        return Experts(number_of, top, ffn, normalized=True, balance_loss=loss)
    groups = count(of("n_routing_groups")) or 1
    best = count(of("topk_routing_group")) or 1
    learned = truth(of("routed_bias"))
    rate = number(of("routed_bias_update_rate"), 0.0)
    sigmoid = of("routed_score_func") == "sigmoid"
    return Experts(
        number_of,
        top,
        ffn,
        shared_ffn=ffn * (count(of("shared_experts")) or 0),
        dense_layers=tuple(range(min(count(of(KEYS["model.experts.dense_layers"])) or 0, MOST_LAYERS))),
        score="sigmoid" if sigmoid else "softmax",
        normalized=sigmoid,
        scale=number(of("routed_scaling_factor"), 1.0),
        groups=groups,
        top_groups=best,
        group_score="top2" if sigmoid else "max",
        balance_loss=loss,
        balance_bias=rate if learned else None,
    )
