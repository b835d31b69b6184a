"""picotron's JSON (huggingface/picotron 59714b1, template/base_config.json, train.py)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.values import product
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model import presets
from phalanx.spec.model.spec import ModelSpec

_SCHEDULES = {"1f1b": "1f1b", "afab": "gpipe"}
_CHANGED = "layers and heads that the file changes are not in the config.json of its model: change them there"
_RING = "attention over cp ranks writes its scores (picotron/context_parallel/context_parallel.py)"
_WHOLE = "every tp rank gathers all logits (picotron/tensor_parallel/tensor_parallel.py), which is not priced"


def read(config: Config, world: int | None = None) -> Configuration:
    """Read picotron's file: it states every degree, and the world is their product."""
    keys = Keys(config, key_table("picotron"))
    degrees = {name: keys.count(f"distributed.{name}_size", f"strategy.{name}") for name in ("dp", "pp", "cp", "tp")}
    if missing := [name for name, degree in degrees.items() if degree is None]:
        key = f"distributed.{missing[0]}_size"
        raise InputError(key, None, "is missing, or no count", "picotron states each degree")
    dp, pp, cp, tp = degrees.values()
    micro = keys.count("training.micro_batch_size", "strategy.micro_batch")
    steps = keys.count("training.gradient_accumulation_steps", "accumulation")
    seq = keys.count("training.seq_length", "job.seq")
    engine = str(keys.take("distributed.pp_engine", "strategy.schedule", "1f1b"))
    if engine not in _SCHEDULES:
        raise InputError("distributed.pp_engine", engine, "is not an engine of picotron", nearest(engine, _SCHEDULES))
    on_cpu = keys.truth("distributed.use_cpu", "job.precision", False)
    flash = keys.take("environment.FLASH_ATTEN", "options.attention", "1")
    fused = keys.truth("model.use_fused_adam", "options.update", False)
    type_ = "fp32" if on_cpu else "bf16"
    options = {"attention": "unfused" if (cp or 1) > 1 else "flash2" if str(flash) == "1" else "flash"}
    options |= {"update": "fused" if fused else "foreach"}
    layout = StatedLayout(
        world=world or product(dp, pp, cp, tp),
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        zero=0,
        sp=False,
        schedule=_SCHEDULES[engine],
        micro_batch=micro,
        accumulation=steps,
        global_batch=product(micro, steps, dp),
        seq=seq,
        precision=type_,
        recompute="none",
    )
    name = str(keys.take("model.name", "model", "") or "")
    spec, why = _model(keys, name, seq)
    own = {"bf16": "bfloat16", "fp32": "float32"}[type_]
    summed = "float32" if (product(dp, cp) or 1) > 1 else own
    changed = spec is None and any(name.startswith("model.num_") for name in keys.understood)
    cases = ((_CHANGED, changed), (_RING, (cp or 1) > 1), (_WHOLE, (tp or 1) > 1))
    notes = tuple(note for note, holds in cases if holds)
    return keys.configuration(
        "picotron",
        "picotron",
        layout,
        model_name=name,
        spec=spec,
        open_model=why,
        options=options,
        fields={"order": "dp/pp/cp/tp"},
        job={
            "optimizer": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
            "clip": 0.0,
            "compute": type_,
            "types": {"reduce": summed, "accumulate": summed, "master": own},
        },
        notes=notes,
    )


def _model(keys: Keys, name: str, seq: int | None) -> tuple[ModelSpec | None, str]:
    """Return the published model of a name, with the sizes that the file changes and an untied head; None with the
    reason for an unknown name. Raises InputError for heads that do not divide its width."""
    named = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    sizes = {field: keys.count(f"model.{theirs}", f"model.{field}") for field, theirs in named.items()}
    known = presets.published(name) if name else None
    if known is None:
        return None, f"it names {name or 'no model'}, whose sizes are not known here"
    spec = make_model({"preset": known}, Path())[0]
    changes: dict[str, Any] = {field: value for field, value in sizes.items() if value is not None}
    heads = sizes["heads"] or spec.heads
    if spec.hidden % heads:
        raise InputError("model.num_attention_heads", heads, f"does not divide the hidden size of {spec.hidden}")
    return replace(spec, **changes, head_dim=spec.hidden // heads, tied=False, max_seq=seq or spec.max_seq), ""
