"""Several jobs on one network: the share of its rate that each keeps on common links, and the step time that results.

A job's step is a cycle of three phases: its passes, with the messages inside layers and between stages; gradients
and parameters; the update. Jobs that send at once share links max-min fairly (links.py). Passes send now and then, so
only some messages of two jobs coincide; for a job in some phase

    kept = sum over sets S of other jobs of P(exactly S sends) x (its share of its rate alone while S sends)
    P(a job sends) = its seconds on shared links at the rate that it keeps / seconds of its phase at that rate

which is solved for all jobs at once. The seconds of a phase at a share of the links are priced, not stretched: what
is hidden stays hidden until it no longer fits. Its seconds on the links are the slope of these prices where the links
are so slow that nothing is hidden. Gradients of which more than half is hidden under the passes are one phase with
them. Ends of phases are events; jobs start anywhere in their cycles (drawn), and steps are counted after a first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from phalanx.planning.stragglers.links import Links, SendingGroups
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.strategy.mesh import Ranks

Floats = npt.NDArray[np.float64]
_TIMES_SLOWER = np.array([1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0])
"""Inverse shares of the links at which a step is priced; between them seconds are interpolated."""
_BARE = 1e3
"""Inverse share at which nothing that is sent is hidden."""


@dataclass(frozen=True)
class SecondsOfStep:
    """Seconds of a step's parts at a share of the links."""

    passes_s: float
    gradients_s: float
    """Exposed seconds of gradients and parameters."""
    update_s: float


@dataclass(frozen=True)
class Phase:
    """A phase of a job's step. `seconds`: at each of `_TIMES_SLOWER`."""

    name: str
    seconds: Floats
    sending_s: float
    """Seconds on the shared links at their full rate."""
    groups: tuple[Ranks, ...]
    """Groups that send, in GPUs of the cluster, each (groups, ranks)."""

    def at(self, share: float) -> float:
        """Return the phase's seconds at a share of the links' rate."""
        beyond = max(1 / share - _TIMES_SLOWER[-1], 0.0)  # where nothing is hidden any more
        return float(np.interp(1 / share, _TIMES_SLOWER, self.seconds) + beyond * self.sending_s)

    def sends(self, share: float) -> float:
        """Return the share of the phase's time in which it sends, at a share of the links' rate."""
        seconds = self.at(share)
        return min(self.sending_s / share / seconds, 1.0) if seconds else 0.0


@dataclass(frozen=True)
class SharedStep:
    """A job's step on links that other jobs use too: the phases of its cycle."""

    phases: tuple[Phase, ...]

    @property
    def alone_s(self) -> float:
        """Seconds of a step without the others."""
        return sum(p.at(1.0) for p in self.phases)


def shared_step(price: Callable[[float], SecondsOfStep], of: SendingGroups, gpus: Ranks) -> SharedStep:
    """Return the phases of a job on these GPUs, (ranks,). `price`: from a share of the links' rate to the seconds of
    the job's step; `of`: the groups that send, in ranks."""
    priced = [price(1 / times) for times in _TIMES_SLOWER]
    slow, slower = price(1 / _BARE), price(1 / (2 * _BARE))
    passes = np.array([p.passes_s for p in priced])
    gradients = np.array([p.gradients_s for p in priced])
    in_passes = max(slower.passes_s - slow.passes_s, 0.0) / _BARE
    in_gradients = max(slower.gradients_s - slow.gradients_s, 0.0) / _BARE
    inside, reducing = (tuple(gpus[g] for g in groups) for groups in (of.layers + of.messages, of.gradients))
    update = Phase("update", np.full(len(priced), priced[0].update_s), 0.0, ())
    if in_gradients > 2 * gradients[0]:
        both = Phase("passes and gradients", passes + gradients, in_passes + in_gradients, inside + reducing)
        return SharedStep((both, update))
    return SharedStep(
        (
            Phase("passes", passes, in_passes, inside),
            Phase("gradients and parameters", gradients, in_gradients, reducing),
            update,
        )
    )


@dataclass(frozen=True)
class StepsTogether:
    """Steps of several jobs that run at once."""

    mean_s: Floats
    """Mean seconds of a step in a run from each drawn start, (draws, jobs)."""
    by_phase_s: tuple[Floats, ...]
    """For each job the mean seconds of its phases, (phases,)."""
    kept: Floats
    """Mean share of its rate that a job keeps while it sends, (jobs,)."""


def shared_tiers(cluster: ClusterSpec, jobs: Sequence[Sequence[Ranks]]) -> tuple[int, ...]:
    """Return the tiers on which some job is slower while all jobs send than it would be alone. `jobs`: for each the
    GPUs of its groups, arrays of shape (groups, ranks)."""
    every = range(len(cluster.tiers))
    return tuple(i for i in every if (Links(cluster, i, cluster.ranks).among(jobs) < 1 - 1e-9).any())


class SharedNetwork:
    """Jobs on the links of a cluster."""

    def __init__(self, cluster: ClusterSpec, jobs: Sequence[SharedStep]) -> None:
        self.jobs = tuple(jobs)
        self._links = [Links(cluster, i, cluster.ranks) for i in range(len(cluster.tiers))]
        self._fair: dict[tuple[int, ...], Floats] = {}
        self._paces: dict[tuple[int, ...], Floats] = {}

    def fair(self, phases: tuple[int, ...]) -> Floats:
        """Return the share of its rate that each job keeps while all jobs send, (jobs,). `phases`: the phase of each
        job; -1: it does not send."""
        if phases not in self._fair:
            groups = [job.phases[p].groups if p >= 0 else () for job, p in zip(self.jobs, phases, strict=True)]
            self._fair[phases] = np.min([links.among(groups) for links in self._links], axis=0)
        return self._fair[phases]

    def kept(self, phases: tuple[int, ...]) -> Floats:
        """Return the mean share of its rate that each job keeps while all are in these phases, (jobs,)."""
        if phases in self._paces:
            return self._paces[phases]
        now = [job.phases[p] for job, p in zip(self.jobs, phases, strict=True)]
        senders = [i for i, phase in enumerate(now) if phase.sending_s]
        kept = np.ones(len(now))
        if len(senders) < 2:
            return kept
        # Sets of jobs that send, (sets, senders), and what each of these jobs keeps in each.
        active = np.array(list(product((False, True), repeat=len(senders))), dtype=bool)
        fair = np.ones(active.shape)
        for row, sending in enumerate(active):
            on = {i for i, sends in zip(senders, sending, strict=True) if sends}
            fair[row] = self.fair(tuple(p if i in on else -1 for i, p in enumerate(phases)))[senders]
        for _ in range(50):
            sends = np.array([now[i].sends(kept[i]) for i in senders])
            chances = np.where(active, sends, 1 - sends)
            mean = np.ones(len(now))
            for column, i in enumerate(senders):
                others = np.delete(chances, column, axis=1).prod(axis=1)
                mean[i] = float((others * fair[:, column])[active[:, column]].sum())
            if np.abs(mean - kept).max() < 1e-9:
                break
            kept = mean
        self._paces[phases] = kept
        return kept

    def run(self, starts: Floats, steps: int) -> StepsTogether:
        """Run all jobs until each has taken `steps` steps, counted from the first end of a step. `starts`: how far
        into their cycles jobs are at the beginning, in shares of a step, (draws, jobs)."""
        count = len(self.jobs)
        mean = np.zeros(starts.shape)
        in_phase = [np.zeros(len(job.phases)) for job in self.jobs]
        kept_s, sending_s = np.zeros(count), np.zeros(count)
        for draw, row in enumerate(starts):
            phase, left = zip(*(_at(job, float(x)) for job, x in zip(self.jobs, row, strict=True)), strict=True)
            now, rest, clock = list(phase), np.array(left), 0.0
            first, ended, last = np.full(count, np.nan), np.zeros(count, dtype=int), np.zeros(count)
            while (ended < steps).any():
                kept = self.kept(tuple(now))
                seconds = np.array([j.phases[p].at(k) for j, p, k in zip(self.jobs, now, kept, strict=True)])
                until = rest * seconds
                passed = float(until.min())
                clock += passed
                rest = rest - np.divide(passed, seconds, out=np.ones(count), where=seconds > 0)
                for i, job in enumerate(self.jobs):
                    if not np.isnan(first[i]) and ended[i] < steps:
                        in_phase[i][now[i]] += passed
                        sending = passed * job.phases[now[i]].sends(kept[i])
                        sending_s[i], kept_s[i] = sending_s[i] + sending, kept_s[i] + sending * kept[i]
                    if until[i] > passed * (1 + 1e-12):
                        continue
                    now[i], rest[i] = (now[i] + 1) % len(job.phases), 1.0
                    if now[i] == 0:
                        if np.isnan(first[i]):
                            first[i] = clock
                        elif ended[i] < steps:
                            ended[i], last[i] = ended[i] + 1, clock
            mean[draw] = (last - first) / steps
        by_phase = tuple(row / (len(starts) * steps) for row in in_phase)
        return StepsTogether(mean, by_phase, np.divide(kept_s, sending_s, out=np.ones(count), where=sending_s > 0))


def _at(job: SharedStep, start: float) -> tuple[int, float]:
    """Return the phase of a job that is `start` steps into its cycle, and the share of that phase that is left."""
    at = start * job.alone_s
    for number, phase in enumerate(job.phases):
        seconds = phase.at(1.0)
        if at < seconds:
            return number, 1 - at / seconds
        at -= seconds
    return 0, 1.0
