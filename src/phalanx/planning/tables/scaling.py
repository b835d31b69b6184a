"""Scaling of a training: the best strategy by number of GPUs, batch, link rates and device."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.planner import best_on
from phalanx.planning.search.priced import COMMUNICATION, price
from phalanx.planning.search.refine import RankedStrategy
from phalanx.planning.tables.table import Sheet, columns
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_strategy

Question = Callable[[int], Pricing]
"""A question on any number of GPUs."""


def by_gpus(question: Question, gpus: Sequence[int], weak: bool) -> Sheet:
    """Tabulate strong scaling (one batch on more GPUs), or weak scaling (the batch grows with the GPUs, to the
    question's on the last number of them)."""
    full_batch, most = question(gpus[-1]).job.global_batch, gpus[-1]
    rows: list[tuple[object, ...]] = []
    base = computing = 0.0
    # The best strategy for each number of GPUs, compared with the first that fits.
    for n in gpus:
        p = question(n)
        batch = full_batch * n // most if weak else full_batch
        if not batch:
            rows.append((n, 0, "less than a sequence", *(None,) * (len(_SCALED) - 3)))
            continue
        p = replace(p, job=replace(p.job, global_batch=batch))
        best = best_on(p, n)
        row = _row(p, n, batch, base, best)
        if best is None:
            rows.append((*row, *(None,) * (len(_SCALED) - len(row))))
            continue
        if not base:
            base = batch * p.job.seq / best.seconds / n
            computing = _computing(best) * n / batch
            row = _row(p, n, batch, base, best)
        lost, step = _lost(best), best.seconds
        slower = (_computing(best) - computing * batch / n) / step
        hours = n * step / 3600 / (batch * p.job.seq) * 1e9
        rows.append((*row, *(seconds / step for seconds in lost), slower, hours))
    # Explain the columns, and efficiencies above one.
    note = (
        "efficiency: tokens/s per GPU over that of the first row that fits; lost, as shares of the step, to exposed "
        "communication, the bubble, the slowest stage, and computing: what a sequence's computing takes longer than "
        "in the first row, in smaller pieces or with more repeated (negative: less)"
    )
    if headroom := question(most).headroom:
        note += f"; every strategy leaves {headroom:.0%} of the memory free, as in phalanx plan"
    above = [(n, row) for n, row in zip(gpus, rows, strict=True) if isinstance(row[5], float) and row[5] > _ABOVE_ONE]
    if above:
        first = next(n for n, row in zip(gpus, rows, strict=True) if row[4] is not None)
        note += f"; above 100 %: {_why_above(question(first), first, *max(above, key=lambda item: item[1][5]))}"  # type: ignore[arg-type,return-value]
    title = "strong scaling: one batch on more GPUs"
    if weak:
        title = f"weak scaling: the batch grows with the GPUs, to {full_batch:,}"
    return Sheet(title, _SCALED, rows, note, stacked=("communication", "bubble", "imbalance", "computing"))


def _why_above(p: Pricing, first: int, n: int, row: tuple[object, ...]) -> str:
    """Return the reason, in words, why the best strategy on `n` GPUs is more efficient than on `first` GPUs. `row`:
    the table's row of `n`."""
    s = make_strategy(str(row[2]))
    assert s is not None
    dp = s.dp * first // n
    if dp and s.dp * first % n == 0:
        there = replace(s, dp=dp, shard=None if s.shard is None else min(s.shard, dp), zero=s.zero if dp > 1 else 0)
        job = replace(p.job, global_batch=max(1, int(str(row[1])) * first // n))
        try:
            check(there, p.model, job, None)
            priced = price(replace(p, job=job), [there])[0]
        except InputError:
            priced = None
        if priced is not None and not priced.fits:
            need = f"{priced.bytes_ / GIB:.1f} of {priced.usable / GIB:.1f} GiB"
            return f"on {first} GPUs that strategy, with dp={dp}, does not fit ({need}), and what fits is slower"
    return f"with {first} GPUs the degrees of that strategy do not divide them and the batch"


_ABOVE_ONE = 1.0005
"""Smallest efficiency that is printed as more than 100.0 %."""


_COLUMNS = columns(
    "GPUs [count] | batch [count] | strategy | step [s] | tokens/s [count] | efficiency [share] | MFU [share]"
)


_SCALED = (
    *_COLUMNS,
    *columns(
        "communication [share] | bubble [share] | imbalance [share] | computing [share] "
        "| GPU-hours a billion tokens [count]"
    ),
)


def _lost(best: RankedStrategy) -> tuple[float, float, float]:
    """Return the seconds of a step in which a mean rank does not compute: exposed communication, the bubble, and the
    slowest pipeline rank's excess over the mean."""
    run = best.run
    slowest = run.makespan - run.bubble
    exposed = sum(best.priced.terms.get(name, 0.0) for name in COMMUNICATION)
    return exposed, run.bubble, slowest * run.imbalance / (1 + run.imbalance)


def _computing(best: RankedStrategy) -> float:
    """Return the seconds of a step that a mean rank computes."""
    return best.seconds - sum(_lost(best))


def _row(p: Pricing, gpus: int, batch: int, base: float, best: RankedStrategy | None) -> tuple[object, ...]:
    if best is None:
        return (gpus, batch, "nothing fits or divides", None, None, None, None)
    rate = batch * p.job.seq / best.seconds
    share = rate / gpus / base if base else 1.0
    return (gpus, batch, str(best.strategy), best.seconds, rate, share, best.mfu)


def by_batch(question: Question, gpus: int, batches: Sequence[int]) -> Sheet:
    """Tabulate efficiency against the batch; the critical batch is the smallest with 90 % of the best rate."""
    p = question(gpus)
    asked = [replace(p, job=replace(p.job, global_batch=b)) for b in batches]
    rows = [_row(q, gpus, b, 0.0, best_on(q, gpus)) for q, b in zip(asked, batches, strict=True)]
    best = max((row[4] for row in rows if row[4] is not None), default=None)  # type: ignore[type-var]
    with_efficiency, critical = [], None
    for row in rows:
        share = row[4] / best if row[4] is not None and best else None  # type: ignore[operator]
        if critical is None and share is not None and share >= 0.9:
            critical = row[1]
        with_efficiency.append((*row[:5], share, row[6]))
    what = "critical batch of speed, from which 90 % of the best rate is reached (that of learning, beyond which a "
    what += "larger one saves few steps, is a bound from above that no price knows)"
    note = f"{what}: {critical}" if critical else "nothing fits"
    return Sheet(f"efficiency against the batch on {gpus} GPUs", _COLUMNS, with_efficiency, note)


def sensitivity(question: Question, gpus: int) -> Sheet:
    """Tabulate the best strategy with the network, then the fastest links, at half and at double their rate."""
    p, rows = question(gpus), []
    base: float | None = None
    for label, inner, outer in (
        ("unchanged", 1.0, 1.0),
        ("network at half", 1.0, 0.5),
        ("network at double", 1.0, 2.0),
        ("inside the node at half", 0.5, 1.0),
        ("inside the node at double", 2.0, 1.0),
    ):
        tiers = tuple(
            replace(
                t,
                bandwidth_bytes_per_s_per_gpu_per_direction=t.bandwidth_bytes_per_s_per_gpu_per_direction
                * (inner if i == 0 else outer),
            )
            for i, t in enumerate(p.cluster.tiers)
        )
        best = best_on(replace(p, cluster=replace(p.cluster, tiers=tiers)), gpus)
        if best is None:
            continue
        base = base or best.seconds
        rows.append((label, str(best.strategy), best.seconds, best.seconds / base - 1, best.mfu))
    return Sheet(
        f"sensitivity on {gpus} GPUs", columns("links | strategy | step [s] | change [share] | MFU [share]"), rows
    )


def by_device(questions: Sequence[tuple[str, Question]], gpus: int) -> Sheet:
    """Tabulate the best strategy for the same job on each of several clusters, with speed and rates over the first
    cluster's."""
    rows: list[tuple[object, ...]] = []
    first: tuple[float, ...] = ()
    for name, question in questions:
        p = question(gpus)
        best, device = best_on(p, gpus), p.cluster.device
        rates = (
            float(p.system.peak_bf16),
            device.memory_bandwidth_bytes_per_s,
            p.cluster.tiers[0].bandwidth_bytes_per_s_per_gpu_per_direction,
        )
        rate = p.job.global_batch * p.job.seq / best.seconds if best else 0.0
        first = first or (rate, *rates)
        times = [mine / its if its else None for mine, its in zip((rate, *rates), first, strict=True)]
        if best is None:
            rows.append((name, device.name, "nothing fits or divides", None, None, None, None, *times[1:]))
        else:
            rows.append((name, device.name, str(best.strategy), best.seconds, rate, best.mfu, *times))
    return Sheet(
        f"what the device changes, on {gpus} of each",
        columns(
            "cluster | device | strategy | step [s] | tokens/s [count] | MFU [share] "
            "| times the first [count] | by FLOP/s [count] | by memory [count] | by links [count]"
        ),
        rows,
        "times the first cluster's tokens/s; and its FLOP/s in 16 bits, its memory's and fastest links' rates alone",
    )
