"""How a training scales: the best strategy on more and more GPUs, on a batch or with it, and what moves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.planner import best_on
from phalanx.plan.tables.table import Sheet, columns

Question = Callable[[int], Pricing]


def by_gpus(question: Question, gpus: Sequence[int], weak: bool) -> Sheet:
    """Strong scaling: the same batch; weak: the batch grows with the GPUs, from that of the first."""
    first = question(gpus[0]).job.global_batch
    rows, base = [], 0.0
    for n in gpus:
        p = question(n)
        batch = first * n // gpus[0] if weak else first
        p = replace(p, job=replace(p.job, global_batch=batch))
        rows.append(_row(p, n, batch, base))
        rate = rows[-1][4]
        if not base and isinstance(rate, float):
            base = rate / n
            rows[-1] = _row(p, n, batch, base)
    return Sheet(
        "weak scaling: the batch grows with the GPUs" if weak else "strong scaling: one batch on more GPUs",
        _COLUMNS,
        rows,
        "efficiency: tokens/s per GPU over that of the first row that fits",
    )


_COLUMNS = columns(
    ("GPUs", "count"),
    ("batch", "count"),
    "strategy",
    ("step", "s"),
    ("tokens/s", "count"),
    ("efficiency", "share"),
    ("MFU", "share"),
)


def _row(p: Pricing, gpus: int, batch: int, base: float) -> tuple[object, ...]:
    found = best_on(p, gpus)
    if found is None:
        return (gpus, batch, "nothing fits or divides", None, None, None, None)
    priced, seconds, mfu = found
    rate = batch * p.job.seq / seconds
    return (gpus, batch, str(priced.strategy), seconds, rate, rate / gpus / base if base else 1.0, mfu)


def by_batch(question: Question, gpus: int, batches: Sequence[int]) -> Sheet:
    """Efficiency against the batch; the critical batch is the smallest from which 90 % of the best is reached."""
    p = question(gpus)
    rows = [_row(replace(p, job=replace(p.job, global_batch=b)), gpus, b, 0.0) for b in batches]
    most = max((row[4] for row in rows if row[4] is not None), default=None)  # type: ignore[type-var]
    marked, critical = [], None
    for row in rows:
        share = row[4] / most if row[4] is not None and most else None  # type: ignore[operator]
        if critical is None and share is not None and share >= 0.9:
            critical = row[1]
        marked.append((*row[:5], share, row[6]))
    said = f"critical batch, from which 90 % of the best rate is reached: {critical}" if critical else "nothing fits"
    return Sheet(f"efficiency against the batch on {gpus} GPUs", _COLUMNS, marked, said)


def sensitivity(question: Question, gpus: int) -> Sheet:
    """The network at half and at double its rate, the fastest links likewise: planned anew each time."""
    p, rows = question(gpus), []
    base: float | None = None
    for what, inner, outer in (
        ("as it is", 1.0, 1.0),
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
        found = best_on(replace(p, cluster=replace(p.cluster, tiers=tiers)), gpus)
        if found is None:
            continue
        base = base or found[1]
        rows.append((what, str(found[0].strategy), found[1], found[1] / base - 1, found[2]))
    return Sheet(
        f"sensitivity on {gpus} GPUs",
        columns("links", "strategy", ("step", "s"), ("change", "share"), ("MFU", "share")),
        rows,
    )


def by_device(questions: Sequence[tuple[str, Question]], gpus: int) -> Sheet:
    """The same job on other hardware."""
    rows: list[tuple[object, ...]] = []
    for name, question in questions:
        p = question(gpus)
        found = best_on(p, gpus)
        if found is None:
            rows.append((name, p.cluster.device.name, "nothing fits or divides", None, None, None))
        else:
            rate = p.job.global_batch * p.job.seq / found[1]
            rows.append((name, p.cluster.device.name, str(found[0].strategy), found[1], rate, found[2]))
    return Sheet(
        f"what the device changes, on {gpus} of each",
        columns("cluster", "device", "strategy", ("step", "s"), ("tokens/s", "count"), ("MFU", "share")),
        rows,
    )
