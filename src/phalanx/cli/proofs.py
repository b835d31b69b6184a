"""`phalanx verify`, `observe` and `parity`: a program's step observed, and compared with its plan or one process."""

from pathlib import Path
from typing import Annotated

from phalanx.answers.question.query import Query
from phalanx.cli.command import command, command_with_progress
from phalanx.cli.output import Display, Printed, show_notes
from phalanx.cli.terminal import announce, require_torch, require_writable


@command_with_progress
def verify(
    query: Annotated[Query, "source", "strategy", "model", "cluster", "gpus", "batch", "seq", "precision"],
    output: Annotated[Display, "json", "save", "assertions"],
    overrides: list[str] | None = None,
    device: str = "cpu",
) -> None:
    """Run one real training step of each class of ranks, on tensors without content, and compare it with the plan.

    Name a plan, a run's folder, a job file or another framework's configuration; or model, cluster and the rest.

    --device cpu|cuda: Tensors of the host, or of a fake GPU: then a wrong device, a wait of the host for the GPU, a
        missing kernel or a buffer in flight is named with its line. Needs no GPU.
    """
    require_torch()
    from phalanx.answers.runs.verify import run, target
    from phalanx.spec.errors import InputError

    if device not in ("cpu", "cuda"):
        raise InputError("device", device, "is neither cpu nor cuda", "use cuda for a fake GPU")
    subject = target(query, overrides or (), announce)
    show_notes(subject.notes)
    result = run(subject, announce, device == "cuda")
    output.show(result, failed=not result.proved)


@command_with_progress
def observe(
    output: Annotated[Display, "json", "save", "assertions"],
    command: list[str],
    world: int = 1,
    ranks: str = "classes",
    mesh: str | None = None,
    node: int = 8,
    step: int = 2,
    every_micro_batch: bool = False,
    branches: str | None = None,
    out: Path | None = None,
) -> None:
    """Run a program as one rank of each kind, on fake tensors, and show what one training step does.

    command -- python train.py ARGS: The program, as you would start one rank of it: a script, or -m MODULE.
    --world: Number of ranks of the fake world.
    --ranks classes|all|0,8: Ranks to observe; `classes` finds one of each kind.
    --mesh pp=8,dp=8: Names of the mesh axes, outermost first, for a program that makes its groups without a
        DeviceMesh.
    --node: Ranks of a node, as LOCAL_WORLD_SIZE and GPUs say.
    --step: Which step to record; the first initialises lazily.
    --every-micro-batch: Also run a pipeline's micro-batches that repeat others.
    --branches train.py:41=true: What a question to a tensor answers at a line, where that depends on data.
    --out observed.json: Also write the observation to a file.
    """
    require_torch()
    require_writable("--out", out)
    from phalanx.answers.answer import plain
    from phalanx.answers.observed import observe as run
    from phalanx.answers.observed import program, request
    from phalanx.spec.files.plan import write_json

    result = run(program(command), request(world, ranks, mesh, node, step, every_micro_batch, branches))
    if out is not None:
        write_json(out, plain(result))
    if not output.json:
        show_notes(tuple(dict.fromkeys(n for r in result.ranks for n in r.notes)))
    output.show(result)


@command
def parity(
    output: Printed,
    words: list[str] | None = None,
    strategy: str | None = None,
    steps: int = 10,
    dtype: str = "float64",
    overrides: list[str] | None = None,
    program: Path | None = None,
    ranks: int | None = None,
) -> None:
    """Compare losses, gradients and gradient norms of a strategy with one process, under SGD and AdamW.

    With --program the first step of your own module is compared, on your own batches: `phalanx parity --program
    train.py --ranks 2 -- ARGUMENTS`.

    words JOB.toml: The job file; with --program, the program's arguments.
    --steps: Number of steps to compare.
    --dtype: Type to compute in: float64 or float32.
    --program TRAIN.py: Run a program that trains by phalanx.parallelize, for one step.
    --ranks: Ranks of the program.
    """
    require_torch()
    if program is not None:
        _of_program(program, ranks, words or [], output, [strategy, *(overrides or ())])
        return
    job = _job(words, ranks)
    from phalanx.answers.plan import with_strategy
    from phalanx.answers.runs.parity import parity as compare
    from phalanx.spec.files import job_file

    file = with_strategy(job_file.load(job, overrides or ()), strategy)
    show_notes(file.notes)
    output.show(compare(file, steps, dtype, announce))


def _job(words: list[str] | None, ranks: int | None) -> Path:
    from phalanx.spec.errors import InputError

    if ranks is not None:
        raise InputError("--ranks", ranks, "is of --program: a job's strategy says how many there are")
    if not words or len(words) > 1:
        raise InputError("JOB.toml", " ".join(words) if words else None, "must be one file", "or say --program")
    return Path(words[0])


def _of_program(
    program: Path, ranks: int | None, arguments: list[str], output: Display, of_jobs: list[str | None]
) -> None:
    from phalanx.answers.runs.parity import program_parity
    from phalanx.spec.errors import InputError

    for value in of_jobs:
        if value is not None:
            raise InputError("--program", str(program), f"has its own strategy and settings, not {value}")
    if ranks is None:
        raise InputError("--ranks", None, "is missing", "say as many as the program's strategy has, as --ranks 2")
    output.show(program_parity(program, ranks, arguments))
