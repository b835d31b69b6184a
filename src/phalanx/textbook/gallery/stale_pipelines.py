"""A picture of stale gradients: PipeDream (Narayanan et al. 2019), emulated in one process.

Each of P stages has one weight, the model is their product, y = w_(P-1) ... w_0, and the loss its distance from a
target; several targets are fitted at once, each by weights of its own. Stages follow 1F1B without a flush: a stage
takes a step of SGD as soon as it has a micro-batch's gradient, so stage r takes P - 1 - r steps between a
micro-batch's forward and its backward pass. The order of passes is the schedule's (schedule/pipeline).
"""

from math import pi, sin

import numpy as np
import numpy.typing as npt

from phalanx.report.pictures.figure import Lines, Picture, PlotAxis, Series
from phalanx.schedule.pipeline.schedules import build
from phalanx.schedule.pipeline.simulate import run, unit_costs
from phalanx.spec.errors import InputError

Values = npt.NDArray[np.float64]

_TARGETS = np.linspace(0.5, 1.5, 5)
"""Targets of the products; all weights begin at 1."""
_MOST_STAGES = 16
"""The most stages: with more, the curve only oscillates."""


def losses(stages: int, steps: int, rate: float, targets: Values, stash: bool, flush: bool = False) -> list[float]:
    """Return the mean loss of each micro-batch in its forward pass, (steps,).

    `stash`: whether a backward pass uses the weights of its forward pass, kept until then. `flush`: one micro-batch
    after the other, which is SGD in one process.
    """
    schedule = build("naive" if flush else "1f1b", stages, steps)
    spans = run(schedule, unit_costs(stages))
    ranks = zip(spans, schedule.actions, strict=True)
    timed = [(span[0], action) for of_rank in ranks for span, action in zip(*of_rank, strict=True)]
    w = [np.ones_like(targets) for _ in range(stages)]
    kept: dict[tuple[int, int], Values] = {}  # by (stage, micro-batch), as are the two below
    inputs: dict[tuple[int, int], Values] = {}
    gradients: dict[tuple[int, int], Values] = {}
    losses_by_step = []
    for _, (kind, stage, i) in sorted(timed):
        if kind == "F":
            kept[stage, i] = w[stage]
            x = inputs.setdefault((stage, i), np.ones_like(targets))
            inputs[stage + 1, i] = y = x * w[stage]
            if stage == stages - 1:
                gradients[stage, i] = y - targets
                losses_by_step.append(float(((y - targets) ** 2).mean() / 2))
            continue
        gradient, used = gradients.pop((stage, i)), kept.pop((stage, i))
        gradients[stage - 1, i] = gradient * (used if stash else w[stage])
        w[stage] = w[stage] - rate * gradient * inputs.pop((stage, i))
    return losses_by_step


def largest_rate(stages: int, flush: bool) -> float:
    """Return the learning rate above which weights near their target, 1, diverge.

    Near it every gradient is the error E. In one process E falls by rate x P E in each step, so it grows
    beyond a rate of 2/P. Without a flush its parts are 0 to P - 1 steps old, E(i+1) = E(i) - rate (E(i) + ... +
    E(i-P+1)): its root on the unit circle is exp(i pi / P), at the rate 1 - cos(pi / P).
    """
    return 2 / stages if flush else 2 * sin(pi / (2 * stages)) ** 2


def staleness(ranks: int = 8) -> Picture:
    """Draw the loss of a pipeline without a flush and of one process, and the largest learning rate of each."""
    if not 2 <= ranks <= _MOST_STAGES:
        raise InputError("ranks", ranks, "cannot be drawn", f"use 2 to {_MOST_STAGES}")
    rate = float(f"{largest_rate(ranks, flush=False) / 2:.1g}")
    steps = 10 * ranks
    ways = (
        ("with a flush: as one process", True, True),
        ("no flush, stashed weights", True, False),
        ("no flush, the newest weights", False, False),
    )
    curves = [
        Series(name, list(enumerate(losses(ranks, steps, rate, _TARGETS, stash, flush))), colour=i)
        for i, (name, stash, flush) in enumerate(ways)
    ]
    stages = range(2, _MOST_STAGES + 1)
    limits = [
        Series(name, [(p, largest_rate(p, flush)) for p in stages], colour=i)
        for i, (name, flush) in enumerate((("with a flush", True), ("no flush", False)))
    ]
    return Picture(
        f"What staleness does: {ranks} stages, each with one weight, fitted to five targets",
        (
            Lines(
                PlotAxis("micro-batches, each followed by a step of SGD", "count"),
                PlotAxis("loss", low=0.0),
                tuple(curves),
                head=f"At a learning rate of {rate:g}: the loss that each micro-batch sees",
            ),
            Lines(
                PlotAxis("stages", "count"),
                PlotAxis("learning rate", log=True),
                tuple(limits),
                head="The largest learning rate that converges: 2/P, without a flush 1 - cos(pi/P)",
                height=220,
            ),
        ),
        "PipeDream (Narayanan et al. 2019), emulated in one process in the order of `phalanx pipeline show 1f1b`",
        f"The first stage's gradients are {ranks - 1} steps old, the last one's new. Stashed weights make a gradient "
        "that of one set of weights, with a copy for each batch in flight; they do not make it newer. In return no "
        "stage waits: there is no bubble.",
    )
