"""A job trained for some steps under one strategy of every family, and each run compared with its plan.

A family's strategy is its simplest: all ranks on one axis, and one micro-batch, or two for each pipeline stage.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import quantiles

from phalanx.answers.machine.this_machine import Announce, require_local
from phalanx.answers.runs.train import prepare_data, run_training
from phalanx.measure.this_machine import default_ranks
from phalanx.planning.tables.table import Sheet, columns
from phalanx.runs.folder import RUNS, metrics
from phalanx.runs.initial_weights import start_from_weights
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import JobFile, make_strategy
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class SweptRun:
    """A strategy's run and its plan: seconds of the median step, bytes of peak memory. `spread_s`: the first and
    third quartile of its steps."""

    strategy: Strategy
    predicted_s: float
    measured_s: float
    spread_s: tuple[float, float]
    predicted_bytes: int
    measured_bytes: int
    differs: bool
    """Whether the recorded events differ from the plan's."""


@dataclass(frozen=True)
class TrainingSweep:
    """All runs, and the families that this job and machine do not allow, with the reason."""

    runs: tuple[SweptRun, ...]
    refused: tuple[tuple[str, str], ...]
    interrupted: bool = False


def families(file: JobFile, ranks: int) -> Iterator[str]:
    """Yield the strategy's line of each family over a number of ranks."""
    batch = file.job.global_batch
    whole, rank_batch = f"micro_batch={batch}", f"micro_batch={max(1, batch // ranks)}"
    half_batch = f"micro_batch={max(1, batch // (2 * ranks))}"
    yield f"dp=1,{whole}"
    yield f"dp=1,{whole},recompute=full"
    if ranks == 1:
        return
    yield from (f"dp={ranks},zero={zero},{rank_batch}" for zero in range(4))
    if ranks % 2 == 0 and ranks > 2:
        yield f"dp={ranks},zero=3,shard={ranks // 2},{rank_batch}"
    yield from (f"dp={ranks},compression={name},{rank_batch}" for name in ("int8", "powersgd:4"))
    yield f"tp={ranks},{whole}"
    yield f"tp={ranks},sp=1,{whole}"
    yield f"cp={ranks},{whole}"
    yield f"cp={ranks},ulysses={ranks},{whole}"
    if file.model.experts is not None:
        yield f"dp={ranks},ep={ranks},{rank_batch}"
    for name, facts in SCHEDULES.items():
        virtual = f",virtual={facts.chunks}" if facts.takes_virtual else ""
        yield f"pp={ranks},schedule={name}{virtual},{half_batch}"


def sweep(file: JobFile, steps: int, announce: Announce) -> TrainingSweep:
    """Train every legal family for `steps` steps; an interruption returns the runs so far.

    Raises InputError, also if no family can be trained; RankFailure."""
    ranks = file.cluster.ranks or default_ranks()
    require_local(ranks)
    prepare_data(start_from_weights(file, lambda _: None) if file.train.weights else file, announce)
    legal, refused = [], []
    for line in families(file, ranks):
        try:
            s = make_strategy(line)
            assert s is not None
            check(s, file.model, file.job, None)
            require_runnable(s, file.job)
            legal.append(s)
        except InputError as error:
            refused.append((line, str(error)))
    runs: list[SweptRun] = []
    for number, s in enumerate(legal, 1):
        announce(f"{number} of {len(legal)}: {s}")
        name = f"{file.train.name}-sweep"
        brief = replace(file.train, name=name, steps=steps, warmup=0, eval_batches=1, eval_every=0, save_every=0)
        job = replace(file, strategy=s, train=replace(brief, check_sync=0, sample_tokens=0))
        try:
            outcome = run_training(job, False, None, lambda _: None, (lambda _: None) if runs else announce)
        except InputError as error:  # it does not fit
            refused.append((str(s), str(error)))
            continue
        except KeyboardInterrupt:  # before its ranks had begun, or a second time
            shutil.rmtree(RUNS / name, ignore_errors=True)
            return TrainingSweep(tuple(runs), tuple(refused), True)
        assert outcome is not None
        times = [float(row["step_time_s"]) for row in metrics(outcome.folder)[1:]]  # the first is instrumented
        shutil.rmtree(outcome.folder)
        figures = {c.name: c for c in outcome.comparison}
        if outcome.interrupted or not figures:
            return TrainingSweep(tuple(runs), tuple(refused), True)
        step, memory = figures["step time (median)"], figures["peak memory"]
        assert memory.measured is not None
        assert step.measured is not None
        sizes = int(memory.predicted), int(memory.measured)
        spread = quantiles(times, n=4, method="inclusive")
        times_s = step.predicted, step.measured, (spread[0], spread[2])
        runs.append(SweptRun(s, *times_s, *sizes, bool(outcome.differences)))
    if not runs:
        line, reason = refused[0]
        raise InputError("job", file.train.name, f"allows none of {len(refused)} families; {line}: {reason}")
    return TrainingSweep(tuple(runs), tuple(refused))


def sheet(swept: TrainingSweep, steps: int) -> Sheet:
    """Tabulate predicted and measured time and memory of every run."""
    rows = []
    for number, run in enumerate(swept.runs, 1):
        times = (run.predicted_s, run.measured_s, run.predicted_s / run.measured_s - 1)
        sizes = (run.predicted_bytes, run.measured_bytes, run.predicted_bytes / run.measured_bytes - 1)
        rows.append((number, str(run.strategy), *times, *sizes))
    names = columns(
        "no. [count] | strategy | step predicted [s] | step measured [s] | step off [share] "
        "| memory predicted [bytes] | memory measured [bytes] | memory off [share]"
    )
    note = f"the median of {steps} steps; " + (
        "every recorded step equals its plan, event for event"
        if not any(run.differs for run in swept.runs)
        else "recorded events differ from the plan of " + ", ".join(str(r.strategy) for r in swept.runs if r.differs)
    )
    return Sheet("every family, as predicted and as measured", names, rows, note, keys=2)
