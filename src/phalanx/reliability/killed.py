"""A kill within a step: what detection, restart and lost work cost, by kind of restart."""

from __future__ import annotations

from phalanx.answers.disturbances import Kill
from phalanx.answers.question.question import Question
from phalanx.answers.simulation import KilledStep, Restart
from phalanx.reliability import presets
from phalanx.reliability.conditions import Conditions, premise_of, trained_in


def killed(
    question: Question, kill: Kill, step_s: float, at_s: float, stopped_ranks: int, last_end_s: float
) -> KilledStep:
    """Return what a kill costs; the restart is of software where a process dies, of hardware where a node does. Saves
    come at the best interval of the restart's kind, and the kill at any moment between two of them. Raises
    InputError."""
    trained = trained_in(question, step_s, None)
    restarts, interval, taken = [], 0.0, dict[str, str]()
    for kind in presets.RESTARTS.values():
        premise = premise_of(trained, Conditions(restart=kind.name))
        cause = next(c for c in premise.causes if c.takes_node == kill.takes_node and c.name != "silent")
        again = (premise.interval_s + premise.saving.stall_s) / 2 + premise.saving.lag_s + at_s
        restart = cause.restart_s + cause.wait_s
        hours = trained.gpus * (cause.detect_s + restart + again) / 3600
        restarts.append(Restart(kind.name, cause.detect_s, restart, again, hours))
        interval = interval or premise.interval_s
        taken |= {t.what: f"{t.what}: {t.value} ({t.source})" for t in premise.taken if t.what in _SAID}
    return KilledStep(
        what=f"{'node' if kill.takes_node else 'rank'} {kill.number}",
        at_s=at_s,
        stopped_ranks=stopped_ranks,
        all_stopped_s=max(last_end_s - at_s, 0.0),
        interval_s=interval,
        restarts=tuple(restarts),
        taken=tuple(taken.values()),
    )


_SAID = ("failures", "storage", "spares")
"""Presets that every kind of restart has in common."""
