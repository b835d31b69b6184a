"""nanotron's YAML (src/nanotron/config/config.py, parallelism_config.py)."""

from __future__ import annotations

from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, Layout, count, number, product, truth
from phalanx.frameworks.nanotron.keys import KEY
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec

_SIZES = {field.removeprefix("model."): key.rpartition(".")[2] for field, key in KEY.items() if "model." in field}
_ABSENT = object()
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_ENGINES = {"1f1b": "1f1b", "afab": "gpipe"}


def read(config: Config, world: int | None = None) -> Configuration:
    """Read nanotron's file: it states every degree, and dp is one of them."""
    keys = Keys(config)
    dp, pp, tp = (count(keys.take(f"parallelism.{name}", f"strategy.{name}")) for name in ("dp", "pp", "tp"))
    cp = count(keys.take("parallelism.context_parallel_size", "strategy.cp", 1))
    ep = count(keys.take("parallelism.expert_parallel_size", "strategy.ep", 1))
    micro = count(keys.take("tokens.micro_batch_size", "strategy.micro_batch"))
    steps = count(keys.take("tokens.batch_accumulation_per_replica", "accumulation"))
    zero = keys.take("optimizer.zero_stage", "strategy.zero", 0)
    mode = str(keys.take("parallelism.tp_mode", "strategy.sp", "ALL_REDUCE")).upper()
    again = truth(keys.take("parallelism.recompute_layer", "strategy.recompute"))
    layout = Layout(
        world=world or product(dp, pp, tp, cp),
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=zero if isinstance(zero, int) else None,
        sp=mode == "REDUCE_SCATTER" and (tp or 1) > 1,
        schedule=_ENGINES.get(str(keys.take("parallelism.pp_engine", "strategy.schedule", "1f1b")).lower()),
        micro_batch=micro,
        accumulation=steps,
        global_batch=product(micro, steps, dp),
        seq=count(keys.take("tokens.sequence_length", "job.seq")),
        precision=_TYPES.get(str(keys.take("model.dtype", "job.precision"))),
        recompute=None if again is None else "full" if again else "none",
    )
    model = keys.take("model.model_config", "model")
    taken = dict(model) if isinstance(model, dict) else {}
    spec, why = _model(taken)
    options, fields, job = _options(keys, zero), _fields(keys), _job(keys)
    quiet, open_, unknown = keys.rest("nanotron")
    return Configuration(
        "nanotron",
        "nanotron",
        layout,
        keys.understood,
        quiet,
        open_,
        unknown,
        taken,
        spec=spec,
        open_model=why,
        options=options,
        fields=fields,
        job=job | {"compute": layout.precision or "bf16"},
    )


def _model(sizes: dict[str, Any]) -> tuple[ModelSpec | None, str]:
    """Return the model of nanotron's LlamaConfig or Qwen2Config, or None with what is missing."""
    names = ("hidden", "ffn", "layers", "heads", "kv_heads", "max_seq", "vocab", "norm_eps", "rope_theta", "tied")
    given = {n: sizes[_SIZES[n]] for n in names if sizes.get(_SIZES[n]) is not None}
    missing = [_SIZES[n] for n in ("hidden", "ffn", "layers", "heads", "vocab") if n not in given]
    if missing:
        return None, f"model.model_config leaves {', '.join(missing)} open"
    family = "qwen2" if sizes.get("is_qwen2_config") else "llama"
    defaults = {"max_seq": 2048, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tied": False}
    try:
        fields: dict[str, Any] = complete({"family": family, **defaults, **given})
        fields |= {name: float(fields[name]) for name in ("norm_eps", "rope_theta")}
        return build(ModelSpec, fields, "model"), ""
    except (InputError, TypeError, ValueError) as error:
        return None, f"model.model_config cannot be read: {error}"


def _options(keys: Keys, zero: Any) -> dict[str, Any]:
    """Return what is beyond the strategy: gradients in bf16, asynchronous tensor parallelism."""
    options: dict[str, Any] = {}
    if truth(keys.take("optimizer.accumulate_grad_in_fp32", "options.gradients")) is False:
        options["gradients"] = "bfloat16"
    if truth(keys.take("parallelism.tp_linear_async_communication", "options.tp_overlap")):
        options["tp_overlap"] = "async"
    return options


def _fields(keys: Keys) -> dict[str, Any]:
    size = count(keys.take(KEY["strategy.bucket"], "strategy.bucket"))
    return {"bucket": float(size)} if size else {}


def _job(keys: Keys) -> dict[str, Any]:
    """Return optimizer and clipping."""

    def of(field: str, default: float) -> float:
        return number(keys.take(KEY[field], field), default)

    clip = keys.take(KEY["job.clip"], "job.clip", _ABSENT)
    return {
        "optimizer": {
            "betas": (of("job.optimizer.betas.0", 0.9), of("job.optimizer.betas.1", 0.95)),
            "eps": of("job.optimizer.eps", 1e-8),
            "weight_decay": of("job.optimizer.weight_decay", 0.01),
        },
        "clip": 1.0 if clip is _ABSENT else number(clip, 0.0),  # null: none
    }
