"""`phalanx measure`, `diagnose` and `validate`: what this machine and its runs say."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.answers.question.query import Query
from phalanx.cli.command import command, require_only
from phalanx.cli.forms import forms, has_option
from phalanx.cli.options import STRATEGY_FIELDS
from phalanx.cli.output import Display, Printed, Saved
from phalanx.cli.terminal import announce, require_torch, require_writable

if TYPE_CHECKING:
    from phalanx.spec.cluster.spec import ClusterSpec

OPTIONS = """
--out FILE.toml: Write the measured cluster to this file; under torchrun the default is cluster.toml.
--runs FILE.csv: Your own measured runs, in the columns of the published ones that ship with Phalanx.
--rows FAMILY: Show this source family only, row by row, published and predicted.
"""


@command
def of_machine(
    line: typer.Context,
    output: Saved,
    ranks: int | None = None,
    dtype: str = "float32",
    threads: int = 1,
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Measure kernel rates, links and collectives of this machine, or under torchrun of all hosts.

    `train` and `plan` use the result: on this machine by itself, elsewhere as cluster.file.

    --ranks: Number of local ranks; by default one per GPU or core.
    --dtype: Type that kernels compute in: float32, bfloat16, ...
    --threads: Number of threads per rank.
    --quick: Measure this machine at fewer sizes in fewer rounds: in seconds, not a minute, and less exactly.
    """
    from phalanx.answers.machine.measure import measure as measure_machine
    from phalanx.answers.machine.measure import measure_ranks

    require_writable("--out", out)
    require_torch()
    from phalanx.measure.steal_time import disturbances
    from phalanx.runtime.process.environment import external_world

    world = external_world()
    if world is None:
        _show(measure_machine(ranks, dtype, threads, quick, announce), out, output)
        return
    require_only(line, "dtype", "threads", "out", reason="is for this machine alone, not under torchrun")
    # The other ranks are no children of this one, and count as others.
    with disturbances(announce if world.rank == 0 else lambda _: None, threads):
        measured = measure_ranks(world, dtype, threads)
    if measured is None:
        sys.stdout.flush()
        return
    _show(measured, out or Path("cluster.toml"), output)


@command
def of_nccl_tests(
    files: list[Path], output: Saved, preset: str = "dgx-h100", op: str = "", out: Path | None = None
) -> None:
    """Read what nccl-tests measured on a cluster: its collectives, fitted, with all else from a preset.

    files FILE...: Output of nccl-tests, a file a collective.
    --preset: Cluster preset that the tests were run on.
    --op: Operation that was measured, for files that do not name it.
    """
    from phalanx.answers.machine.measure import from_nccl_tests

    require_writable("--out", out)
    _show(from_nccl_tests(files, preset, op), out, output)


def _show(cluster: ClusterSpec, out: Path | None, output: Display) -> None:
    """Write a measured cluster to its file, and show it."""
    from phalanx.answers.machine.measure import Measurement

    if out is not None:
        from phalanx.spec.files.cluster_toml import to_toml

        out.write_text(to_toml(cluster, f"{cluster.name}, as measured; [cluster] file = {str(out)!r} uses it"))
        announce(f"wrote {out}")
    output.show(Measurement(cluster))


_LOCAL_FIELDS = ("model", "cluster", "gpus", "batch", "seq", "stack", "precision", "options", "changes")


@command
def of_steps(
    steps: list[str], query: Annotated[Query, _LOCAL_FIELDS], output: Saved, out: Path | None = None
) -> None:
    """Fit a few factors to steps that you measured on your machines, and predict with them from then on.

    The factors multiply the seconds of products, attention, memory-bound work, links inside and between nodes, and
    launches; a prior keeps three steps from moving one far. Each step is also predicted from the others.

    steps STEP...: Measured steps: CONFIGURATION=LOG, CONFIGURATION=SECONDS, a log that prints its own arguments,
        tp=8,zero=1=SECONDS with --model and the rest, or a CSV with the columns step and measured.
    --out FILE.toml: Write the factors there, for --calibration.
    """
    from phalanx.answers.machine.calibration import calibration_of

    if out is not None:
        require_writable("--out", out)
    output.show(calibration_of(steps, query, out))


_PLAN_FIELDS = tuple(name for name in STRATEGY_FIELDS if name != "source")


@command
def diagnose(
    files: list[str], query: Annotated[Query, _PLAN_FIELDS], output: Saved, plan: list[Path] | None = None
) -> None:
    """Compare a run's step with its plan part by part, the largest gap first, and what to do about it.

    Every instant of a step is charged to one part: products, attention, memory-bound kernels, launches, each axis's
    exposed communication, the pipeline, data loading, the host, and waiting for other ranks.

    files FILE...: A run's folder, a step log, traces of torch.profiler (.json, .json.gz, a folder of them) or nsys
        (.sqlite), NCCL's log or inspector's dump, a CUDA memory snapshot; or 4.3s, 230TFLOP/s, 9600tok/s/gpu,
        '46% MFU'.
    --plan FILE: What was run: a plan.json, a launch script, a configuration; else --model and the rest.
    """
    from phalanx.answers.diagnose.diagnosis import diagnosis_of

    source = plan[0] if plan else None
    output.show(diagnosis_of(files, replace(query, source=source, files=tuple((plan or [])[1:]))))


@command
def of_times(output: Printed, runs: Path | None = None, rows: str | None = None) -> None:
    """Predict every published run that is fully specified, and show how far off the predictions are."""
    from phalanx.answers.validate import prediction_scores

    output.show(prediction_scores(runs, rows))


@command
def of_choices(output: Printed, runs: Path | None = None, rows: str | None = None) -> None:
    """Score choices: the order of strategies that were measured for one question, and the best predicted strategy
    against those that experts tuned. Searches every recipe: some minutes."""
    from phalanx.answers.validate import choice_scores

    output.show(choice_scores(runs, rows, announce))


@command
def of_kernels(output: Printed, kernels: Path | None = None) -> None:
    """Score the kernel model: products, attention, experts and all-reduces in a node that were measured alone on
    eight chips, also by constants fitted without the chip.

    --kernels FILE.csv: Rows in the columns of those that ship with Phalanx.
    """
    from phalanx.answers.validate import kernel_scores

    output.show(kernel_scores(kernels))


@command
def of_collectives(output: Printed, collectives: Path | None = None) -> None:
    """Score predicted times of single collectives, as nccl-tests measures them, by chip and operation.

    --collectives FILE.csv: Rows in the columns of those that ship with Phalanx.
    """
    from phalanx.answers.validate import collective_scores

    output.show(collective_scores(collectives))


@command
def of_goodput(output: Printed, goodput: Path | None = None) -> None:
    """Predict the effective time, failures and checkpoints of published jobs from what is not the result, and say why
    it misses.

    --goodput FILE.csv: Rows in the columns of those that ship with Phalanx.
    """
    output.show(import_module("phalanx.reliability.validation").goodput_scores(goodput))  # a vertical: named


_FILES = ("goodput", "kernels", "collectives")
"""Forms of `validate` that an option with their own rows names."""
measure = forms(
    "Measure kernels, links and collectives of this machine or, under torchrun, all hosts; read what was measured.",
    lambda _: "machine",
    default="machine",
    machine=of_machine,
    nccl_tests=of_nccl_tests,
    steps=of_steps,
)
validate = forms(
    "Predict every published run that is fully specified, and show how far off the predictions are.",
    lambda words: next((form for form in _FILES if has_option(words, f"--{form}")), "times"),
    default="times",
    times=of_times,
    choices=of_choices,
    kernels=of_kernels,
    collectives=of_collectives,
    goodput=of_goodput,
)
