"""The share of time in which a training advances, in closed form, and the best time between two checkpoints.

A failure comes after an exponential time of mean M. Work is saved every tau seconds of it, and a save stops the
training for delta; a failure then costs the work since the last durable save, the detection D and the restart R, in
which the job may fail again.

    Young 1974    tau = sqrt(2 delta M)
    Daly 2006     tau = sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 18M) - delta, or M from delta = 2M on
    here          T(tau) = (M + E) (exp((tau + delta) / M) - 1), E = sum p (D + M (1 - q)) / sum p q, q = exp(-R / M)

T is the expected time in which tau seconds of work are done and saved, exact for saves that are durable at once. With
D = 0 and one kind of failure it is Daly's M exp(R / M) (exp((tau + delta) / M) - 1). A save that becomes durable
`lag` later, while the training goes on, costs lag more work per failure; where only one save in k survives the loss
of a node, that costs (k - 1) / 2 periods more on average.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.cost.hardware.columns import Column

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FailureCause:
    """A kind of failure of a job, with its rate and what one failure costs in seconds."""

    name: str
    per_s: float
    detect_s: float
    restart_s: float
    """From detection until the job works again: new node, program, checkpoint."""
    wait_s: float = 0.0
    """Expected wait for a spare node, before the restart."""
    takes_node: bool = False
    count: int | None = None
    """Number of failures from which the rate was estimated; None: the rate is taken as exact."""


@dataclass(frozen=True)
class Saving:
    """How a training saves its checkpoints."""

    stall_s: float
    """For how long a save stops the training."""
    lag_s: float = 0.0
    """From the end of that stall until the save is durable."""
    shared_every: int = 1
    """One save in this many survives the loss of a node."""


@dataclass(frozen=True)
class TimeShares:
    """Where the time of a training goes; shares of the whole, numbers or columns."""

    useful: Column
    saving: Column
    lost: Column
    """Work done again."""
    detection: Column
    restart: Column
    waiting: Column
    """For a spare node."""
    planned: float = 0.0


def young(stall_s: float, mttf_s: float) -> float:
    """Return the best seconds of work between saves, to first order (Young 1974)."""
    return float(np.sqrt(2 * stall_s * mttf_s))


def daly(stall_s: float, mttf_s: float) -> float:
    """Return the best seconds of work between saves (Daly 2006, equation 37)."""
    if stall_s >= 2 * mttf_s:
        return mttf_s
    x = stall_s / (2 * mttf_s)
    return float(np.sqrt(2 * stall_s * mttf_s) * (1 + np.sqrt(x) / 3 + x / 9) - stall_s)


def interval_with_recovery(stall_s: float, mttf_s: float, recovery_s: float) -> float:
    """Return the best seconds between the starts of saves, S + sqrt(2 (F + R) S + S^2) (arXiv 2410.18124)."""
    return float(stall_s + np.sqrt(2 * (mttf_s + recovery_s) * stall_s + stall_s**2))


def shares(
    interval_s: float | Floats, causes: Sequence[FailureCause], saving: Saving, planned: float = 0.0
) -> TimeShares:
    """Return the shares of a training's time. `interval_s`: work between saves, a number or a column; `planned`:
    seconds stopped for maintenance per second of training."""
    rate = sum(cause.per_s for cause in causes)
    tau = np.asarray(interval_s, dtype=float)
    period = tau + saving.stall_s
    on = 1 / (1 + planned)
    if rate == 0:
        none = 0.0 * tau
        return TimeShares(on * tau / period, on * saving.stall_s / period, none, none, none, none, 1 - on)
    m = 1 / rate
    p = np.array([cause.per_s for cause in causes]) * m
    r = np.array([cause.restart_s for cause in causes])
    detected = np.array([cause.detect_s for cause in causes])
    waited = np.array([cause.wait_s for cause in causes])
    q = np.exp(-r / m)
    with np.errstate(divide="ignore"):
        again = 1 / np.sum(p * q)  # failures until a restart succeeds
    down = again * np.array([np.sum(p * detected), np.sum(p * m * (1 - q)), np.sum(p * waited)])
    of_nodes = float(np.sum(p * [cause.takes_node for cause in causes]))
    set_back = saving.lag_s + of_nodes * (saving.shared_every - 1) / 2 * period
    with np.errstate(over="ignore", invalid="ignore"):
        fails = np.expm1(period / m)  # per saved segment, before it
        whole = (m + down.sum() + set_back) * fails
        lost = np.maximum((m + set_back) * fails - period, 0.0)
        lost, unseen, restarted, waited = (on * part / whole for part in (lost, *(fails * d for d in down)))
        saved = on * saving.stall_s / whole
        return TimeShares(on * tau / whole, saved, lost, unseen, restarted, waited, 1 - on)


def best_interval(causes: Sequence[FailureCause], saving: Saving, step_s: float) -> float:
    """Return the seconds of work between saves, in whole steps, with the largest useful share; infinity if the job
    never fails."""
    rate = sum(cause.per_s for cause in causes)
    if rate == 0:
        return float("inf")
    grid = step_s * np.unique(np.ceil(np.geomspace(1, 10 / rate / step_s, 4000)))
    useful = shares(grid, causes, saving).useful
    return float(grid[int(np.argmax(np.nan_to_num(useful)))])


def expected_wait(spares: int, per_s: float, repair_s: float) -> float:
    """Return the expected wait for a node after a failure that takes one, in seconds.

    The number of nodes in repair is about Poisson. A failure that meets n of them, and no spare left, waits for the
    first n - spares + 1 of n + 1 repairs. While the job waits no node fails: failures come every 1 / per_s + wait."""
    if per_s == 0:
        return 0.0
    most = per_s * repair_s
    reach = 12 * np.sqrt(most + 1) + 20  # beyond it no share of a Poisson number is left
    n = np.arange(int(most + reach))
    log_factorials = np.concatenate(([0.0], np.cumsum(np.log(n[1:]))))
    waits = repair_s * np.maximum(n - spares + 1, 0) / (n + 1)

    def wait_at(assumed: float) -> float:
        load = repair_s / (1 / per_s + assumed)
        near = slice(max(0, int(load - reach)), int(load + reach))
        return float(np.sum(np.exp(n[near] * np.log(load) - load - log_factorials[near]) * waits[near]))

    low, high = 0.0, repair_s  # wait_at falls as the assumed wait grows: bisect for where the two are equal
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if wait_at(middle) > middle else (low, middle)
    return (low + high) / 2
