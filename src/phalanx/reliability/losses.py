"""What failures take: a kill within a step, by kind of restart; and of a training, layout by layout, for a search
that weighs days with failures, not steps.

On the same GPUs all layouts fail alike. They lose unlike: ZeRO spreads a checkpoint over more writers, parameters
that are their own masters make it smaller, an elastic job of many replicas waits less for a node.
"""

from phalanx.answers.disturbances import Kill
from phalanx.answers.question.question import Question
from phalanx.answers.search.whole_training import Losses
from phalanx.answers.simulation import KilledStep, Restart
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.training_cost import TrainingLosses
from phalanx.reliability import presets
from phalanx.reliability.conditions import Conditions, premise_of, require_progress, trained_in, trained_on
from phalanx.reliability.conditions_by_name import conditions_in
from phalanx.spec.strategy.spec import Strategy


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


def losses_under(given: Conditions | str) -> Losses:
    """Return what gives a layout's losses. `given`: conditions, or a line of them. Raises InputError."""
    conditions = conditions_in(given) if isinstance(given, str) else given

    def losses(p: Pricing, s: Strategy, step_s: float) -> TrainingLosses:
        t = trained_on(p, s, step_s, conditions.checkpoint_bytes)
        premise = premise_of(t, conditions)
        of = premise.shares()
        require_progress(premise, float(of.useful))
        down = of.detection + of.restart + of.waiting + of.planned
        return TrainingLosses(
            effective_share=float(of.useful),
            saving_share=float(of.saving),
            again_share=float(of.lost),
            down_share=float(down),
            checkpoint_bytes=t.checkpoint_bytes,
            stall_s=premise.saving.stall_s,
            load_s=premise.load_s,
            interval_s=premise.interval_s,
            spare_gpus=premise.spares * p.cluster.ranks_per_node,
        )

    return losses
