"""Resuming a run: which one, with which job, and what may not have changed since."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.planning.auto.bucket_size import has_buckets
from phalanx.runs.folder import RUNS, latest_run
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.job_file import JobFile
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job
from phalanx.spec.optimizers import OuterOptimizer
from phalanx.spec.strategy.spec import DEFAULT_BUCKET_MIB, Strategy, divisors


def resumed_job(path: Path | None, overrides: Sequence[str]) -> JobFile:
    """Return the job of a resumed run, with `overrides`: its job file at `path`, or by default the plan of the latest
    run. A strategy that the planner chose stays. Raises InputError if there is nothing to resume, or a change would
    make it another run."""
    from phalanx.runtime.checkpoint.store import defect, intact_steps, why_none_intact

    file = plan.job_of(path, overrides) if path else None
    folder = RUNS / file.train.name if file else latest_run()
    if path:
        _in_its_place(path, folder)
    done = intact_steps(folder / "checkpoint")
    if not (folder / "plan.json").exists() or not done:
        why = why_none_intact(folder / "checkpoint")
        raise InputError("resume", str(folder), why, "train it anew instead of resuming")
    old = plan.read(folder / "plan.json")
    if file is None:
        file = plan.as_job(old, overrides)
    file = _with_tokenizer(replace(file, strategy=_as_before(file.strategy, old.strategy)), old)
    _same_run(file, old)
    # If the last checkpoint is damaged, the ranks set it aside, and an earlier one has steps left.
    if done[-1] >= file.train.steps and defect(folder / "checkpoint", done[-1]) is None:
        raise InputError("resume", str(folder), f"is finished at step {done[-1]}", "raise train.steps to go on")
    return file


def _in_its_place(path: Path, folder: Path) -> None:
    """Raise InputError if `path` is the folder or plan of a run that was moved or copied away from `folder`, where
    runs of its name are kept."""
    run = path.parent if path.name == "plan.json" else path
    if (run / "checkpoint").is_dir() and run.resolve() != folder.resolve():
        reason = f"is a copy of a run that is resumed from {folder}"
        raise InputError("resume", str(run), reason, f"move it to {folder} first, or name the job file")


def resume_point(folder: Path) -> str:
    """Say from which step the restarted ranks of a run continue."""
    from phalanx.runtime.checkpoint.store import intact_steps

    saved = intact_steps(folder / "checkpoint")
    return f"the run continues from step {saved[-1]}" if saved else "the run starts over: nothing was saved yet"


def was_started_by(launchers: Sequence[str], name: str) -> bool:
    """Whether one of these launchers also started the run `name` before: its ranks failed and were restarted."""
    try:
        old = plan.read(RUNS / name / "plan.json")
    except InputError:  # no plan, or one of another version: not started a moment ago
        return False
    return not set(launchers).isdisjoint(old.choices.get("launchers", ()))


def job_for_ranks(file: JobFile, ranks: int) -> JobFile:
    """Return the job of a run that was restarted with another number of ranks: its strategy with another number of
    replicas. Raises InputError if the batch does not allow that."""
    old = plan.read(RUNS / file.train.name / "plan.json")
    strategy = strategy_for_ranks(_as_before(file.strategy, old.strategy), file.job, ranks)
    file = _with_tokenizer(replace(file, strategy=strategy), old)
    _same_run(file, old)
    return file


def strategy_for_ranks(strategy: Strategy, job: Job, ranks: int) -> Strategy:
    """Return the strategy with as many replicas as make it use `ranks` ranks. A `shard` that does not divide the new
    `dp` becomes the default; `micro_batch` becomes its largest divisor that divides a replica's batch. Raises
    InputError."""
    s = strategy
    if s.world == ranks:
        return s
    replica = s.world // s.dp
    if ranks % replica:
        raise InputError("ranks", ranks, f"cannot hold {s}: a replica has {replica}", f"use a multiple of {replica}")
    dp = ranks // replica
    if job.global_batch % dp:
        possible = ", ".join(str(d * replica) for d in divisors(job.global_batch))
        raise InputError(
            "ranks", ranks, f"cannot share job.global_batch = {job.global_batch} evenly", f"use one of {possible}"
        )
    shard = s.shard if s.shard and dp % s.shard == 0 else None
    return replace(s, dp=dp, shard=shard, micro_batch=math.gcd(s.micro_batch, job.global_batch // dp))


def _as_before(strategy: Strategy | None, old: Strategy) -> Strategy:
    """Return the strategy to continue with: the old one if none is named. On the old layout, automatic bucket sizes
    are kept regardless of new measurements, so that losses stay bitwise equal."""
    if strategy is not None and strategy != replace(old, bucket="auto"):
        return strategy
    # Plans that say "auto" were written before bucket sizes were resolved, and ran with the default.
    return replace(old, bucket=DEFAULT_BUCKET_MIB) if has_buckets(old) and old.bucket == "auto" else old


def _with_tokenizer(file: JobFile, old: Plan) -> JobFile:
    """Return the job with the tokenizer of its initial weights, if it names none."""
    if file.train.weights and not file.train.tokenizer:
        return replace(file, train=replace(file.train, tokenizer=old.train.tokenizer))
    return file


def _same_run(file: JobFile, old: Plan) -> None:
    """Raise InputError if a resumed job would be another run: another model, or another order of the data. Data may
    have moved: content is compared when it is read."""
    for name, now, before in (
        ("model", file.model, old.model),
        ("job.global_batch", file.job.global_batch, old.job.global_batch),
        ("job.seq", file.job.seq, old.job.seq),
        ("job.documents", file.job.documents, old.job.documents),
        ("job.precision", file.job.precision, old.job.precision),
        ("job.optimizer.name", file.job.optimizer.name, old.job.optimizer.name),
        ("train.seed", file.train.seed, old.train.seed),
        ("train.name", file.train.name, old.train.name),
    ):
        if now != before:
            shown = None if name == "model" else now
            raise InputError(name, shown, "cannot change when a run is resumed", "train it under another train.name")
    _outer_state(file, old)


def _outer_state(file: JobFile, old: Plan) -> None:
    """Raise InputError if the outer optimizer of a local-SGD run (strategy.local) needs state that the checkpoint
    does not have."""
    if file.strategy is None or not file.strategy.local:
        return
    now, before = file.job.outer, old.job.outer if old.strategy.local else OuterOptimizer(momentum=0)
    rows = (
        ("momentum", 0, now.momentum > 0, before.momentum > 0),
        ("fragments", 1, now.fragments > 1, before.apart),
        ("mix", 0, now.mix > 0, before.apart),
    )
    for name, none, needs, has in rows:
        if needs and not has:
            reason = "needs state of the outer optimizer, and the checkpoint has none"
            raise InputError(f"job.outer.{name}", getattr(now, name), reason, f"use {none}, or train it anew")
