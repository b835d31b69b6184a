"""nanotron's YAML (src/nanotron/config/config.py, parallelism_config.py)."""

from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.values import count, number, product, zero_level
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec

KEYS = key_table("nanotron")
_SIZES = {field: key.rpartition(".")[2] for field, key in KEYS.fields("model").items()}
_ABSENT = object()


def read(config: Config, world: int | None = None) -> Configuration:
    """Read nanotron's file: it states every degree, and dp is one of them."""
    keys = Keys(config, KEYS)
    dp, pp, tp = (count(keys.field(f"strategy.{name}")) for name in ("dp", "pp", "tp"))
    cp, ep = (count(keys.field(f"strategy.{name}", 1)) for name in ("cp", "ep"))
    micro, steps = count(keys.field("strategy.micro_batch")), count(keys.field("accumulation"))
    layout = StatedLayout(
        world=world or product(dp, pp, tp, cp),
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=zero_level(keys.field("strategy.zero", 0)),
        sp=bool(keys.word("strategy.sp", False)) and (tp or 1) > 1,
        schedule=keys.word("strategy.schedule", "1f1b"),
        micro_batch=micro,
        accumulation=steps,
        global_batch=product(micro, steps, dp),
        seq=count(keys.field("job.seq")),
        precision=keys.word("job.precision"),
        recompute=keys.word("strategy.recompute"),
    )
    model = keys.take("model.model_config", "model")
    sizes = dict(model) if isinstance(model, dict) else {}
    spec, why = _model(sizes)
    options, fields, job = _options(keys), _fields(keys), _job(keys)
    return keys.configuration(
        "nanotron",
        "nanotron",
        layout,
        model=sizes,
        spec=spec,
        open_model=why,
        options=options,
        fields=fields,
        job=job | {"compute": layout.precision or "bf16"},
    )


def _model(sizes: dict[str, Any]) -> tuple[ModelSpec | None, str]:
    """Return the model of nanotron's LlamaConfig or Qwen2Config, or None with the reason."""
    given = {field: sizes[key] for field, key in _SIZES.items() if sizes.get(key) is not None}
    missing = [_SIZES[field] for field in ("hidden", "ffn", "layers", "heads", "vocab") if field not in given]
    if missing:
        return None, f"model.model_config leaves {', '.join(missing)} open"
    family = "qwen2" if sizes.get("is_qwen2_config") else "llama"
    if isinstance(moe := sizes.get("moe_config"), dict):
        family, given["experts"] = "qwen2_moe", _experts(moe, count(given["layers"]) or 0)
    defaults = {"max_seq": 2048, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tied": False}
    try:
        fields: dict[str, Any] = complete({"family": family, **defaults, **given})
        fields |= {name: float(fields[name]) for name in ("norm_eps", "rope_theta")}
        return build(ModelSpec, fields, "model"), ""
    except (InputError, TypeError, ValueError) as error:
        return None, f"model.model_config cannot be read: {error}"


def _experts(moe: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the experts of nanotron's MoEConfig with its defaults (config/models_config.py:36)."""
    shared = moe.get("shared_expert_intermediate_size", 5632) if moe.get("enable_shared_expert") else 0
    blocks = moe.get("layers", [-1])
    return {
        "count": moe.get("num_experts", 8),
        "top_k": moe.get("top_k", 2),
        "ffn": moe.get("moe_intermediate_size", 1408),
        "shared_ffn": shared,
        "shared_gate": bool(shared),
        "dense_layers": [] if -1 in blocks else [n for n in range(layers) if n not in blocks],
    }


def _options(keys: Keys) -> dict[str, Any]:
    """Return the options of the stack: gradients in bf16, asynchronous tensor parallelism."""
    stated = {name: keys.word(f"options.{name}") for name in ("gradients", "tp_overlap")}
    return {name: value for name, value in stated.items() if value in ("bfloat16", "async")}


def _fields(keys: Keys) -> dict[str, Any]:
    size = count(keys.field("strategy.bucket"))
    return {"bucket": float(size)} if size else {}


def _job(keys: Keys) -> dict[str, Any]:
    """Return optimizer and clipping."""

    def constant(name: str, default: float) -> float:
        return number(keys.field(f"job.optimizer.{name}"), default)

    clip = keys.field("job.clip", _ABSENT)
    return {
        "optimizer": {
            "betas": (constant("betas.0", 0.9), constant("betas.1", 0.95)),
            "eps": constant("eps", 1e-8),
            "weight_decay": constant("weight_decay", 0.01),
        },
        "clip": 1.0 if clip is _ABSENT else number(clip, 0.0),  # null: none
    }
