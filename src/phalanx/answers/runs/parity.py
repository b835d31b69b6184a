"""Losses and gradients of a strategy compared with one process."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.answers.answer import Answer
from phalanx.answers.machine.this_machine import Announce, require_local, share_gpus
from phalanx.measure.this_machine import local_cluster
from phalanx.planning.auto import transport
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files.job_file import JobFile
from phalanx.spec.model.modules import require_modules
from phalanx.spec.strategy.legality import require_runnable

_MOST_STEPS = 100_000


@dataclass(frozen=True)
class Parity(Answer):
    """The deviation of a strategy from one process, as shares of the largest loss and gradient."""

    strategy: str
    dtype: str
    steps: int
    bound: float
    loss_rel_max: float
    grad_rel_max: float
    passed: bool
    optimizers: tuple[dict[str, Any], ...]
    """A row for each optimizer."""
    compression: dict[str, Any] | None
    """Errors of compressed gradients; None where the strategy compresses none."""


def parity(file: JobFile, steps: int, dtype: str, announce: Announce) -> Parity:
    """Train `steps` steps with the job's strategy and in one process, and compare losses and gradients.

    Raises InputError, RankFailure.
    """
    from phalanx.observation.parity.parity import BOUNDS
    from phalanx.runtime.process.folder import private_folder
    from phalanx.runtime.process.launch import launch

    if dtype not in BOUNDS:
        raise InputError("dtype", dtype, "parity has no bound for it", f"use {' or '.join(BOUNDS)}")
    if steps < 1:
        raise InputError("steps", steps, "must be at least 1")
    if steps > _MOST_STEPS:
        raise InputError("steps", steps, f"must be at most {_MOST_STEPS:,}: every step runs twice")
    if file.strategy is None:
        raise InputError("strategy", "auto", "parity examines one strategy", "name it, e.g. --strategy dp=2")
    require_modules(file.model, file.strategy.cp)
    require_runnable(file.strategy, file.job)
    check(file.strategy, file.model, file.job, None)
    require_local(file.strategy.world)
    train = file.train
    collectives: tuple[Choice, ...] = ()
    # As `train` on this machine; where ranks share GPUs, torch's own collectives: measuring takes minutes there.
    measured = train.transport != "native" and not (train.transport == "auto" and share_gpus(file.strategy.world))
    if file.strategy.world > 1 and measured:
        here = local_cluster(file.strategy.world, file.job.precision.compute, train.threads, announce=announce)
        collectives = transport.decide(here, train.transport)
    with private_folder() as (folder, _):
        out = folder / "parity.json"
        argument = {"tables": job_file.to_tables(file), "out": str(out), "steps": steps, "dtype": dtype}
        argument["collectives"] = [asdict(c) for c in collectives]
        worker, ranks = "phalanx.observation.parity.worker", file.strategy.world
        launch(worker, json.dumps(argument), ranks, train.threads, None, train.timeout_s)
        result = json.loads(out.read_text())
    optimizers, compression = result["optimizers"], result["compression"]
    loss, grad = (max(d[key] for d in optimizers) for key in ("loss_rel_max", "grad_rel_max"))
    lost = (compression or {}).get("lost_rel_max") or 0.0
    return Parity(
        str(file.strategy),
        dtype,
        steps,
        BOUNDS[dtype],
        loss,
        grad,
        max(loss, grad, lost) <= BOUNDS[dtype] and all(d["steps"] for d in optimizers),
        tuple(optimizers),
        compression,
    )


@dataclass(frozen=True)
class ProgramParity(Answer):
    """The deviation of a program's first step from one process, as a share of a gradient's norm. `passes`: number of
    micro-batches of all replicas; `parameters`: number compared, `zero_gradients` of them with a gradient of zero;
    `worst`: the one that deviates most, by `grad_rel_max`, None where that is no number; `joined`: how far two
    micro-batches deviate from one batch of both, None where not known; `looks_across`: what it means."""

    program: str
    strategy: str
    dtype: str
    passes: int
    parameters: int
    zero_gradients: int
    grad_rel_max: float | None
    worst: str
    bound: float
    joined: float | None
    passed: bool
    looks_across: str


def program_parity(
    program: Path, ranks: int, arguments: Sequence[str] = (), timeout_s: float = 300.0
) -> ProgramParity:
    """Run a program that trains by `phalanx.parallelize` on local ranks until its first step has been compared with
    one process on the same batches. Its code is run: name one that you trust. Raises InputError, RankFailure."""
    from phalanx.runtime.any_module.first_step import read_deviation
    from phalanx.runtime.process.folder import private_folder
    from phalanx.runtime.process.launch import launch

    if not program.is_file():
        raise InputError("program", str(program), "is no file", "name a Python program, as train.py")
    require_local(ranks)
    with private_folder() as (folder, _):
        out = folder / "first_step.json"
        task = {"program": str(program), "arguments": list(arguments), "out": str(out), "timeout_s": timeout_s}
        launch("phalanx.observation.parity.program", json.dumps(task), ranks, 1, None, timeout_s)
        deviation = read_deviation(out)
    if deviation is None:
        reason = "ended before a step of a module from phalanx.parallelize"
        raise InputError("program", str(program), reason, "it must call backward(loss, last=True), or step")
    across = deviation.looks_across
    return ProgramParity(str(program), **asdict(deviation), passed=deviation.passed, looks_across=across)
