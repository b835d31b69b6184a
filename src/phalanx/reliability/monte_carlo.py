"""Simulation of a training with its failures, all trials at once: each pass of the loop is the next failure of every
trial.

Times between failures are exponential. Each trial draws its failure rates from the posterior of the counts (a gamma
distribution, Jeffreys' prior). A failed node is repaired in a fixed time, and a spare takes its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

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
    rates = _drawn_rates(causes, random, trials)
    rate = rates.sum(axis=0)
    chances = np.cumsum(rates, axis=0) / np.where(rate > 0, rate, 1.0)
    goal, end = (np.inf if limit is None else float(limit) for limit in (work_s, wall_s))
    running = _Running(trials, saving, min(interval_s, _NEVER), goal, end, spares, repair_s, share_kept)
    columns = _CauseColumns.of(causes)
    while True:
        with np.errstate(divide="ignore"):
            until = random.exponential(1.0, trials) / rate
        running.end_before(until)
        if running.open_.any():
            running.fail((random.random(trials) > chances[:-1]).sum(axis=0), until, columns)
        if not running.open_.any():
            return running.trials()


def _drawn_rates(causes: Sequence[FailureCause], random: np.random.Generator, trials: int) -> Floats:
    """Return failures a second, causes x trials: of a cause whose failures were counted, from its posterior."""
    rates = [
        np.full(trials, c.per_s)
        if c.count is None
        else c.per_s * random.gamma(c.count + 0.5, 1, trials) / max(c.count, 0.5)
        for c in causes
    ]
    return np.array(rates).reshape(len(causes), trials)


@dataclass(frozen=True)
class _CauseColumns:
    """Seconds until a failure of each cause is seen, seconds of its restart, and whether it takes a node."""

    detect_s: Floats
    restart_s: Floats
    takes_node: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, causes: Sequence[FailureCause]) -> Self:
        """Return the columns of causes; without any, of one that never occurs."""
        detect, restart = (np.array([getattr(c, f) for c in causes] or [0.0]) for f in ("detect_s", "restart_s"))
        return cls(detect, restart, np.array([c.takes_node for c in causes] or [False]))


@dataclass
class _Running:
    """Trials under way: limits of all, and columns of one entry a trial."""

    n: int
    saving: Saving
    interval_s: float
    goal: float
    """Seconds of work at which a trial ends; infinite if time ends it."""
    end: float
    """Seconds of wall time at which a trial ends; infinite if its work ends it."""
    spares: int | None
    repair_s: float
    share_kept: float
    wall: Floats = field(init=False)
    useful: Floats = field(init=False)
    saved: Floats = field(init=False)
    lost: Floats = field(init=False)
    detected: Floats = field(init=False)
    restarted: Floats = field(init=False)
    waited: Floats = field(init=False)
    failed: Floats = field(init=False)
    comes_back: Floats = field(init=False)
    """Seconds of restart that are still to pass."""
    since: Floats = field(init=False)
    """Saves made after the last shared one."""
    open_: npt.NDArray[np.bool_] = field(init=False)
    pool: Floats | None = field(init=False)
    """Seconds at which each spare is ready, trials x (spares and the node that failed); None: always enough."""

    def __post_init__(self) -> None:
        for name in (*_PARTS, "comes_back", "since"):
            setattr(self, name, np.zeros(self.n))
        self.open_ = np.ones(self.n, dtype=bool)
        self.pool = None if self.spares is None else np.zeros((self.n, self.spares + 1))

    @property
    def period_s(self) -> float:
        """Seconds from save to save."""
        return self.interval_s + self.saving.stall_s

    def trials(self) -> Trials:
        """Return the trials as they stand."""
        return Trials(*(getattr(self, name) for name in _PARTS))

    def end_before(self, until: Floats) -> None:
        """End the trials that are done before their next failure, which comes `until` seconds from now."""
        left = self.goal - self.useful
        saves = np.maximum(np.ceil(np.where(np.isinf(left), 0.0, left) / self.interval_s) - 1, 0.0)
        ends = np.minimum(self.wall + self.comes_back + left + saves * self.saving.stall_s, self.end)
        over = self.open_ & (ends <= self.wall + until)
        if not over.any():
            return
        passed = np.minimum(ends - self.wall, self.comes_back)
        at_work = ends - self.wall - passed
        full = np.floor(at_work / self.period_s)
        rest = np.minimum(at_work - full * self.period_s, self.interval_s)
        done = full * self.interval_s + rest if np.isinf(self.goal) else left
        self.restarted += np.where(over, passed, 0.0)
        self.useful += np.where(over, done, 0.0)
        self.saved += np.where(over, at_work - done, 0.0)
        self.wall = np.where(over, ends, self.wall)
        self.open_ &= ~over

    def fail(self, kind: npt.NDArray[np.intp], until: Floats, causes: _CauseColumns) -> None:
        """Let every open trial work until it fails, `until` seconds from now, by the cause `kind`; come back to a
        durable save; and wait for a node where the cause takes one."""
        # Work up to the failure, of which durable saves remain.
        active = np.maximum(until - self.comes_back, 0.0)
        kept = np.floor(np.maximum(active - self.saving.lag_s, 0.0) / self.period_s)
        node = causes.takes_node[kind]
        counted, every = self.since + kept, self.saving.shared_every
        newly = np.floor(counted / every) * every
        after = self.useful + np.where(node, newly - self.since, kept) * self.interval_s
        self.since = np.where(node, 0.0, counted - newly)
        spent = kept * self.saving.stall_s
        self.saved += np.where(self.open_, spent, 0.0)
        self.lost += np.where(self.open_, active - spent - (after - self.useful), 0.0)
        self.useful = np.where(self.open_, after, self.useful)
        # The restart.
        self.restarted += np.where(self.open_, np.minimum(until, self.comes_back), 0.0)
        self.comes_back = np.where(self.open_, causes.restart_s[kind], self.comes_back)
        seen = np.where(self.open_, causes.detect_s[kind], 0.0)
        self.detected += seen
        self.failed += self.open_
        now = self.wall + until + seen
        wait = self._wait(now, self.open_ & node)
        self.waited += wait
        self.wall = np.where(self.open_, now + wait, self.wall)
        # Time may run out while the job is down.
        late = self.open_ & (self.wall >= self.end)
        if late.any():
            excess = np.where(late, self.wall - self.end, 0.0)
            of_wait = np.minimum(excess, wait)
            self.waited -= of_wait
            self.detected -= excess - of_wait
            self.wall = np.where(late, self.end, self.wall)
            self.open_ &= ~late

    def _wait(self, now: Floats, fails: npt.NDArray[np.bool_]) -> Floats:
        """Return the seconds for which trials wait for a spare node, in place of one that fails `now`."""
        wait = np.zeros(self.n)
        if self.pool is not None:
            taken = np.flatnonzero(fails)
            self.pool[taken, -1] = now[taken] + self.repair_s
            first = self.pool[taken].argmin(axis=1)
            wait[taken] = np.maximum(self.pool[taken, first] - now[taken], 0.0) * (1 - self.share_kept)
            self.pool[taken, first] = self.pool[taken, -1]
        return wait


_NEVER = 1e30
"""Seconds between saves that are never made."""
_PARTS = ("wall", "useful", "saved", "lost", "detected", "restarted", "waited", "failed")
"""Columns of a trial, in the order of Trials."""
