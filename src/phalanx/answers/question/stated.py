"""A configuration's settings as a Strategy, options, a Job and a model."""

import json
import tempfile
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.registry import FRAMEWORKS, priced_stack
from phalanx.frameworks.values import count
from phalanx.planning import lookup as names
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import PRECISIONS, SHORT_NAMES
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import STAGE_OPTIONS, StackOptions

READ_BY = {framework.reads: framework for framework in FRAMEWORKS.values() if framework.reads}
RECOMPUTED = {"none", "selective", "full"}
_UNIT_OPTIONS = ("units", "unit_size")


def strategy_of(c: Configuration, gpus: int, resized: bool = False) -> Strategy:
    """Return the Strategy of a configuration on `gpus` ranks; `resized`: with the largest divisor of its ep that
    divides them. Raises InputError for what is left open, or what no Strategy can express."""
    s = c.layout
    tp, pp, cp, ep = s.tp or 1, s.pp or 1, s.cp or 1, s.ep or 1
    if gpus % (tp * pp * cp):
        reason = f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} ranks"
        raise InputError("gpus", gpus, reason, f"use a multiple of {tp * pp * cp}")
    dp = gpus // (tp * pp * cp)
    zero = s.zero if s.zero is not None else READ_BY[c.kind].zero or 0
    shard = s.shard if s.shard and zero and dp % s.shard == 0 and s.shard < dp else None
    on_host = c.options.get("optimizer_offload") or c.options.get("parameter_offload")
    recompute = s.recomputed or (s.recompute if s.recompute in RECOMPUTED else "full" if s.recompute else "none")
    virtual = s.virtual or 1
    fields: dict[str, Any] = {
        "dp": dp,
        "zero": zero if dp * cp > 1 or on_host or priced_stack(c.stack).policy.get("levels_alone") else 0,
        "shard": shard,
        "tp": tp,
        "sp": bool(s.sp) and tp > 1,
        "cp": cp,
        "ulysses": s.ulysses or 1,
        "layers": s.layers or "auto",
        "ep": gcd(ep, dp * cp * tp // (s.etp or 1)) if resized else ep,
        "etp": s.etp or 1,
        "pp": pp,
        "virtual": virtual if pp > 1 else 1,
        "micro_batch": s.micro_batch or 1,
        "recompute": recompute,
        **c.fields,
    }
    if pp > 1:
        fields["schedule"] = s.schedule or ("interleaved" if virtual > 1 else "1f1b")
    if dp == 1 or pp == 1:
        fields.pop("order", None)
    return Strategy(**fields)


def options_of(c: Configuration, s: Strategy) -> StackOptions:
    """Return the options that a configuration sets, without options of stages where there is no pipeline, and of
    units where nothing is sharded. Raises InputError for a value that an option cannot have."""
    without = (*(() if s.pp > 1 else STAGE_OPTIONS), *(() if s.level.gradients else _UNIT_OPTIONS))
    return StackOptions(**{n: v for n, v in c.options.items() if n not in without})


def job_of(c: Configuration, batch: int, seq: int) -> Job:
    """Return the job of a configuration: its optimizer, clipping and types, else a Job's defaults. Raises
    InputError."""
    word = str(c.job.get("compute") or c.layout.precision)
    compute = PRECISIONS[word].compute if word in PRECISIONS else SHORT_NAMES.get(word, "bfloat16")
    job = Job(batch, seq, Precision(compute, **c.job.get("types", {})))  # type: ignore[arg-type]
    if "optimizer" in c.job:
        job = replace(job, optimizer=Optimizer(**c.job["optimizer"]))
    return replace(job, clip=c.job["clip"]) if "clip" in c.job else job


def model_of(c: Configuration, named: str | None) -> tuple[ModelSpec, list[str]]:
    """Return (model, notes) of a configuration: the `named` one, else by its own sizes. Raises InputError."""
    if named is not None:
        return names.model_named(named)
    if c.spec is not None:
        return c.spec, []
    sizes = c.sizes
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if count(sizes.get(name)) is None]
    if missing or c.open_model:
        named_only = f"the file names {c.model_name} and leaves its sizes open" if c.model_name else ""
        reason = c.open_model or named_only or f"the file leaves {', '.join(missing)} open"
        stated = "vocab" in reason and "vocab" in key_table(READ_BY[c.kind].folder).fields("model")
        said = ", or say --set model.vocab=N" if stated else ""
        raise InputError("model", None, reason, f"name a preset or a config.json, or write them in the file{said}")
    if experts := sizes.get("num_experts"):
        reason = f"the file has {experts} experts, and sizes alone do not make a mixture of experts"
        raise InputError("model", None, reason, "name a preset or a config.json")
    sizes = {"model_type": "llama", "intermediate_size": 4 * int(sizes["hidden_size"]), **sizes}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(sizes))
        model, notes = names.model_named(str(path))
    return model, [*notes, "the model is of the sizes that the file states, as a Llama"]
