"""axolotl's own keys: number types, batch and recomputation; adapters, preferences, losses and the optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.frameworks.configuration import Config, Keys
from phalanx.frameworks.trainer_tuning import adapter_options, loss_options, optimizer_options, preference_options
from phalanx.frameworks.values import truth

AXES = {
    "dp_replicate": ("dp_replicate_size",),
    "dp_shard": ("dp_shard_size",),
    "tp": ("tensor_parallel_size",),
    "cp": ("context_parallel_size", "sequence_parallel_degree"),
}
"""axolotl's names of a ParallelismConfig's sizes (src/axolotl/utils/distributed.py, _get_parallel_config_kwargs), and
that of context parallelism before 0.12."""
_LOADED = "the model is loaded in bfloat16, and gradients and the optimizer's state are of it"
"""axolotl, src/axolotl/utils/config/__init__.py:191 (cfg.torch_dtype), loaders/model.py:611. Under FSDP and DeepSpeed
the optimizer's weights are of 32 bits, and so are adapters."""
_OFFLOADED = ("unsloth", "offload", "offload_disk")
"""Recomputation from inputs that are kept on the host (axolotl, src/axolotl/utils/schemas/config.py)."""


@dataclass(frozen=True)
class EngineTable:
    """What the table of an engine states: `deepspeed`, `fsdp`, or "" for DDP and one process; None: not stated."""

    engine: str
    zero: int | None = None
    offload: Mapping[str, str | None] | None = None
    recompute: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    units: dict[str, Any] = field(default_factory=dict)
    """Options of the modules that FSDP wraps."""
    replicas_only: bool = False
    """Whether it has no axis but that of replicas, unless a ParallelismConfig names one."""


@dataclass(frozen=True)
class Tuning:
    """What axolotl trains, and how, beyond accelerate's table."""

    options: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    sequences: int = 1
    """Sequences of an example: 2 of a preference."""
    unpriced: str = ""
    notes: tuple[str, ...] = ()


UNTUNED = Tuning()
"""Of accelerate, whose file says nothing of it."""


def is_axolotl(config: Config) -> bool:
    """Whether a file is axolotl's."""
    return "base_model" in config or "micro_batch_size" in config


def has_mesh(config: Config) -> bool:
    """Whether it names an axis of a ParallelismConfig."""
    return any(name in config for names in AXES.values() for name in names)


def trained_as(keys: Keys, s: EngineTable, type_: str | None) -> tuple[EngineTable, str | None]:
    """Return the table with axolotl's batch and recomputation, and the type of products."""
    micro = keys.count("micro_batch_size", "strategy.micro_batch") or s.micro_batch
    steps = keys.count("gradient_accumulation_steps", "accumulation") or s.accumulation
    bf16, fp16 = keys.take("bf16", "job.precision"), keys.take("fp16", "job.precision")
    bf16 = bf16 is None or bf16 == "auto" or truth(bf16)  # of GPUs that have it
    rounded = keys.truth("tf32", "job.precision")
    type_ = "fp16" if truth(fp16) else "bf16" if bf16 else type_ or ("tf32" if rounded else None)
    word = keys.take("gradient_checkpointing", "strategy.recompute")
    again = True if word in _OFFLOADED else truth(word)
    recompute = "full" if again else s.recompute or ("none" if again is False else None)
    return replace(s, micro_batch=micro, accumulation=steps, recompute=recompute), type_


def tuning(keys: Keys, engine: Keys, s: EngineTable, type_: str | None) -> Tuning:
    """Return what is trained, and how. `engine`: DeepSpeed's file, which may state the optimizer; `type_`: that of
    products."""
    trained, unpriced = adapter_options(keys)
    scored, sequences, notes = preference_options(keys, "", bool(trained))
    drawn = keys.truth("random_init", "job.precision")  # in 32 bits
    job: dict[str, Any] = {}
    if type_ == "bf16" and not drawn and not s.engine and not trained:
        job["types"] = dict.fromkeys(("reduce", "accumulate", "master"), "bfloat16")
        notes = (*notes, _LOADED)
    options: dict[str, Any] = {}
    if "optimizer" not in engine.config:
        options, assumed = optimizer_options(keys, "optimizer", bool(trained))
        notes = (*notes, *assumed)
    losses, unfused = loss_options(keys, "", plain=not scored and sequences == 1)
    return Tuning(options | trained | scored | losses, job, sequences, unpriced, (*notes, *unfused))
