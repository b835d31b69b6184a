"""A plan as DeepSpeed's JSON and a script of transformers' Trainer that runs under it."""

import json
import math
from typing import Any

from phalanx.frameworks.deepspeed.read import GRADIENT_BYTES, KEYS
from phalanx.frameworks.keys import optimizer_word
from phalanx.frameworks.writing import reasons
from phalanx.frameworks.writing import trainer_script as trainer
from phalanx.frameworks.writing.blanks import blanks
from phalanx.frameworks.writing.program import Group, TrainingProgram, group
from phalanx.frameworks.writing.script import TORCHRUN, comment
from phalanx.frameworks.writing.subject import Subject
from phalanx.spec.errors import InputError


def program(x: Subject) -> TrainingProgram:
    """Return a plan as ds_config.json and train.py. Raises InputError for a part of the plan that DeepSpeed leaves to
    a model's code."""
    s = x.s
    if 0 < x.options.optimizer_offload < 1 and not s.level.parameters:
        reason = "a part of the optimizer is offloaded at ZeRO level 3 only"
        raise InputError("options.optimizer_offload", x.options.optimizer_offload, reason, "use 1, or zero=3")
    parts = groups(x)
    config: dict[str, Any] = {}
    for g in parts:
        for setting in g.settings:
            *path, last = setting.key.split(".")
            at = config
            for name in path:
                at = at.setdefault(name, {})
            at[last] = setting.value
    more = ""
    if s.cp > 1:
        more = (
            "from accelerate import ParallelismConfig\n\n"
            f'given["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size={s.cp}, '
            f"dp_shard_size={s.dp})\n"
        )
    given = trainer.arguments(x, deepspeed="ds_config.json")
    # JSON has no comments: the reasons stand where the file is used
    why = "".join(comment(f"{g.title}. {g.why}") for g in parts)
    return TrainingProgram(
        x.stack.title,
        parts,
        f"# ds_config.json:\n{why}exec {TORCHRUN} \\\n  train.py",
        blanks=blanks(x, trainer.DATA),
        files={"ds_config.json": json.dumps(config, indent=2) + "\n", **trainer.files(x, given, more)},
    )


def groups(x: Subject) -> tuple[Group, ...]:
    """Return all keys, group by group."""
    s, a = x.s, x.optimizer
    result = [
        group(
            "Batch",
            reasons.batch(x),
            {
                # transformers takes all ranks for replicas, and stops where this is not what it counts
                **({KEYS["job.global_batch"]: x.job.global_batch} if s.dp == s.world else {}),
                KEYS["strategy.micro_batch"]: s.micro_batch,
                KEYS["accumulation"]: x.micro_batches,
                KEYS["job.clip"]: x.job.clip,
            },
        ),
        group("Data parallelism", reasons.data(x), _zero(x)),
        group("Number types", reasons.precision(x), _types(x)),
    ]
    if s.tp > 1:
        result.append(group("Tensor parallelism", reasons.tensor(x), {KEYS["strategy.tp"]: s.tp}))
    if s.cp > 1:
        result.append(group("Sequence parallelism", reasons.context(x), {KEYS["strategy.cp"]: s.cp}))
    parameters = {"lr": "auto", "betas": list(a.betas), "eps": a.eps, "weight_decay": a.weight_decay}
    if a.row.whole:
        parameters = {"lr": "auto", "momentum": a.first_decay, "weight_decay": a.weight_decay}
    result.append(
        group(
            "Optimizer",
            "As the plan's job has it.",
            {KEYS["job.optimizer.name"]: optimizer_word(KEYS, a.name, "DeepSpeed"), "optimizer.params": parameters},
        )
    )
    return tuple(result)


def _zero(x: Subject) -> dict[str, Any]:
    s, o = x.s, x.options
    table: dict[str, Any] = {KEYS["strategy.zero"]: s.zero}
    if s.level.state:
        table["zero_optimization.overlap_comm"] = o.bucket_buffers != "one"
        table["zero_optimization.contiguous_gradients"] = o.bucket_buffers != "none"
    elements = o.bucket_elements if s.bucket == "auto" else math.ceil(s.bucket * 2**20 / GRADIENT_BYTES)
    if elements:
        table[KEYS["strategy.bucket"]] = elements
    if s.level.parameters and s.dp_shard < s.dp:
        table[KEYS["strategy.shard"]] = s.dp_shard
    if o.optimizer_offload:
        table["zero_optimization.offload_optimizer.device"] = "cpu"
        table["zero_optimization.offload_optimizer.pin_memory"] = True
        table["zero_optimization.offload_optimizer.ratio"] = o.optimizer_offload
    if o.parameter_offload:
        table["zero_optimization.offload_param.device"] = "cpu"
        table["zero_optimization.offload_param.pin_memory"] = True
    return table


def _types(x: Subject) -> dict[str, Any]:
    o = x.options
    table: dict[str, Any] = {"bf16.enabled": x.compute == "bf16", "fp16.enabled": x.compute == "fp16"}
    moments = {o.first_moment, o.second_moment}
    if moments - {"auto", "float32"}:
        if moments != {"bfloat16"} or x.compute != "bf16":
            reason = "both moments are bfloat16 together, under bf16 parameters (bf16_optimizer_states)"
            raise InputError("options.first_moment", o.first_moment, reason, "set both to bfloat16, or neither")
        table["bf16.bf16_master_weights_and_grads"] = True
        table["bf16.bf16_optimizer_states"] = True
    stated = {"options.gradients": o.gradients, "options.reduce": o.reduce}
    return table | KEYS.write({name: value for name, value in stated.items() if value != "auto"})
