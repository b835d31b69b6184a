"""A plan as accelerate's YAML (FSDP2, parallelism_config) and a script of transformers' Trainer under it."""

from typing import Any

from phalanx.frameworks.keys import key_table, optimizer_word
from phalanx.frameworks.writing import reasons
from phalanx.frameworks.writing import trainer_script as trainer
from phalanx.frameworks.writing.blanks import blanks
from phalanx.frameworks.writing.program import Group, TrainingProgram, group
from phalanx.frameworks.writing.subject import Subject
from phalanx.frameworks.writing.yaml import document
from phalanx.spec.errors import InputError

KEYS = key_table("accelerate")
_LAUNCH = (
    "exec accelerate launch --config_file accelerate.yaml \\\n"
    '  --num_machines "$NNODES" --machine_rank "$NODE_RANK" --num_processes $((NNODES * NPROC_PER_NODE)) \\\n'
    '  --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" \\\n'
    "  train.py"
)


def program(x: Subject) -> TrainingProgram:
    """Return a plan as accelerate.yaml and train.py. Raises InputError for what accelerate has no key for."""
    s, o = x.s, x.options
    if s.cp > 1 and not s.level.state:
        reason = "accelerate launch takes parallelism_config under FSDP2 alone"
        raise InputError("strategy.cp", s.cp, reason, "use zero=3 and dp=2 or more")
    if o.units == "remainder":
        raise InputError("options.units", o.units, "is how FSDP1 counts, and this is FSDP2", "use module")
    if o.reduce not in ("auto", "bfloat16" if x.compute in ("bf16", "fp16") else "auto"):  # as mixed precision does
        raise InputError("options.reduce", o.reduce, "its YAML has no key for FSDP2's reduce_dtype", "leave it out")
    optimizer_word(key_table("hugging_face"), x.optimizer.name, "a script of transformers")
    parts = groups(x)
    more: dict[str, Any] = {}
    if o.accumulate == "sharded":
        more["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    given = trainer.arguments(x, **more)
    if s.level.gradients:
        given["gradient_checkpointing"] = False  # accelerate.yaml does it
    given["bf16"] = given["fp16"] = False
    return TrainingProgram(
        x.stack.title,
        parts,
        _LAUNCH,
        blanks=blanks(x, trainer.DATA),
        files={
            "accelerate.yaml": document(parts, "accelerate launch --config_file accelerate.yaml"),
            **trainer.files(x, given, from_first_rank=s.level.gradients),
        },
    )


def groups(x: Subject) -> tuple[Group, ...]:
    """Return all keys, group by group."""
    s = x.s
    sharded = s.level.gradients
    result = [
        group(
            "Nodes and ranks",
            reasons.layout(x),
            {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "FSDP" if sharded else "MULTI_GPU" if s.world > 1 else "NO",
                "num_machines": x.nodes,
                "num_processes": s.world,
                "machine_rank": 0,
                "main_training_function": "main",
                "rdzv_backend": "static",
                "same_network": True,
                "use_cpu": False,
                "debug": False,
            },
        ),
        group(
            "Number types",
            reasons.precision(x),
            {"mixed_precision": "no" if x.compute == "fp32" else x.compute, "downcast_bf16": False},
        ),
    ]
    if sharded:
        result.append(group("Data parallelism", f"{reasons.data(x)} {reasons.recomputation(x)}", _fsdp(x)))
    if sharded and (s.cp > 1 or s.dp_replicate > 1):
        result.append(group("Mesh", reasons.context(x), _mesh(x)))
    return tuple(result)


def _fsdp(x: Subject) -> dict[str, Any]:
    s, o = x.s, x.options
    return {
        "fsdp_config.fsdp_version": 2,
        **KEYS.write({"strategy.zero": s.zero}),
        **KEYS.write({"options.units": o.units} | ({"options.unit_size": o.unit_size} if o.unit_size else {})),
        "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        **KEYS.write({"strategy.recompute": s.recompute, "options.parameter_offload": o.parameter_offload}),
        "fsdp_config.fsdp_cpu_ram_efficient_loading": True,
    }


def _mesh(x: Subject) -> dict[str, Any]:
    s = x.s
    table: dict[str, Any] = {
        "parallelism_config.parallelism_config_dp_replicate_size": s.dp_replicate,
        **KEYS.write({"strategy.shard": s.dp_shard, "strategy.cp": s.cp}),
    }
    if s.cp > 1:
        how = "allgather" if x.options.context == "all_gather" else "alltoall"
        table[KEYS["options.context"]] = how
    return table
