"""nanotron's YAML (src/nanotron/config/config.py, parallelism_config.py)."""

from __future__ import annotations

from phalanx.formats.read.configuration import Config, Configuration, Keys, Layout, count, product, truth

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
    quiet, open_, unknown = keys.rest("nanotron")
    return Configuration("nanotron", "nanotron", layout, keys.understood, quiet, open_, unknown, taken)
