"""Simulation of a training with its failures, all trials at once: each pass of the loop is the next failure of every
trial.

Times between failures are exponential. Each trial draws its failure rates from the posterior of the counts (a gamma
distribution, Jeffreys' prior). A failed node is repaired in a fixed time, and a spare takes its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.reliability.closed_form import FailureCause, Floats, Saving


@dataclass(frozen=True)
class Trials:
    """Simulated trainings as columns, one entry a trial: wall time, its parts in seconds, and the number of
    failures."""

    wall_s: Floats
    useful_s: Floats
    saving_s: Floats
    lost_s: Floats
    detection_s: Floats
    restart_s: Floats
    waiting_s: Floats
    failures: Floats


def simulate(
    causes: Sequence[FailureCause],
    saving: Saving,
    interval_s: float,
    *,
    work_s: float | None = None,
    wall_s: float | None = None,
    spares: int | None = None,
    repair_s: float = 0.0,
    share_kept: float = 0.0,
    trials: int = 200,
    seed: int = 0,
) -> Trials:
    """Simulate trainings until `work_s` seconds of work are done, or for `wall_s` seconds. With `work_s` the caller
    has checked that the training advances: one that does not never ends.

    `spares`: spare nodes; None: always enough. `share_kept`: the share of its speed at which a job works on while it
    waits for a node."""
    random = np.random.default_rng(seed)
    n = trials
    rates = np.array(
        [
            np.full(n, c.per_s)
            if c.count is None
            else c.per_s * random.gamma(c.count + 0.5, 1, n) / max(c.count, 0.5)
            for c in causes
        ]
    ).reshape(len(causes), n)
    rate = rates.sum(axis=0)
    chances = np.cumsum(rates, axis=0) / np.where(rate > 0, rate, 1.0)
    detect, restart = (np.array([getattr(c, f) for c in causes] or [0.0]) for f in ("detect_s", "restart_s"))
    takes = np.array([c.takes_node for c in causes] or [False])
    goal, end = (np.inf if limit is None else float(limit) for limit in (work_s, wall_s))
    stall, lag, period, shared_every = saving.stall_s, saving.lag_s, interval_s + saving.stall_s, saving.shared_every
    wall, useful, saved, lost = (np.zeros(n) for _ in range(4))
    detected, restarted, waited, failed = (np.zeros(n) for _ in range(4))
    comes_back = np.zeros(n)  # seconds of restart that are still to pass
    since = np.zeros(n)  # saves made after the last shared one
    open_ = np.ones(n, dtype=bool)
    pool = None if spares is None else np.zeros((n, spares + 1))
    while True:
        with np.errstate(divide="ignore"):
            until = random.exponential(1.0, n) / rate
        active = np.maximum(until - comes_back, 0.0)
        # Would the training end before this failure?
        left = goal - useful
        with np.errstate(invalid="ignore"):
            pauses = np.maximum(np.ceil(left / interval_s) - 1, 0.0) * stall if np.isfinite(interval_s) else 0 * left
        ends = np.minimum(wall + comes_back + left + pauses, end)
        over = open_ & (ends <= wall + until)
        if over.any():
            passed = np.minimum(ends - wall, comes_back)
            at_work = ends - wall - passed
            full = np.floor(at_work / period) if np.isfinite(period) else np.zeros(n)
            rest = np.minimum(at_work - full * period, interval_s)
            restarted += np.where(over, passed, 0.0)
            done = full * interval_s + rest if work_s is None else left
            useful += np.where(over, done, 0.0)
            saved += np.where(over, at_work - done, 0.0)
            wall = np.where(over, ends, wall)
            open_ &= ~over
        if not open_.any():
            return Trials(wall, useful, saved, lost, detected, restarted, waited, failed)
        # Work up to the failure, of which durable saves remain.
        kept = np.floor(np.maximum(active - lag, 0.0) / period) if np.isfinite(period) else np.zeros(n)
        kind = (random.random(n) > chances[:-1]).sum(axis=0)
        passed = np.minimum(until, comes_back)
        node = takes[kind]
        before = useful
        counted = since + kept
        newly = np.floor(counted / shared_every) * shared_every
        shared = before + (newly - since) * interval_s
        after = np.where(node, shared, before + kept * interval_s)
        since = np.where(node, 0.0, counted - newly)
        useful = np.where(open_, after, useful)
        spent = kept * stall
        saved += np.where(open_, spent, 0.0)
        lost += np.where(open_, active - spent - (after - before), 0.0)
        restarted += np.where(open_, passed, 0.0)
        seen = np.where(open_, detect[kind], 0.0)
        detected += seen
        failed += open_
        now = wall + until + seen
        wait = np.zeros(n)
        if pool is not None:
            taken = np.flatnonzero(open_ & node)
            pool[taken, -1] = now[taken] + repair_s
            first = pool[taken].argmin(axis=1)
            wait[taken] = np.maximum(pool[taken, first] - now[taken], 0.0) * (1 - share_kept)
            pool[taken, first] = pool[taken, -1]
        waited += wait
        wall = np.where(open_, now + wait, wall)
        comes_back = np.where(open_, restart[kind], comes_back)
        # Time may run out while the job is down.
        late = open_ & (wall >= end)
        if late.any():
            over_by = np.where(late, wall - end, 0.0)
            of_wait = np.minimum(over_by, wait)
            waited -= of_wait
            detected -= over_by - of_wait
            wall = np.where(late, end, wall)
            open_ &= ~late
            if not open_.any():
                return Trials(wall, useful, saved, lost, detected, restarted, waited, failed)
