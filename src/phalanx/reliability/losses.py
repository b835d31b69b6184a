"""What failures cost: a kill within a step, by kind of restart; and a whole training by layout, for a search that
compares days with failures in place of step times.

On the same GPUs all layouts fail equally often, but lose different amounts of time: ZeRO spreads a checkpoint over
more writers, parameters that are their own masters make it smaller, an elastic job of many replicas waits less for a
node.
"""

from phalanx.answers.disturbances import Kill
from phalanx.answers.question.question import Question
from phalanx.answers.search.whole_training import Losses
from phalanx.answers.simulation import KilledStep, Restart
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.training_cost import TrainingLosses
from phalanx.reliability import presets
from phalanx.reliability.conditions import Conditions, job_of_question, job_of_strategy, premise_of, require_progress
from phalanx.reliability.conditions_by_name import conditions_in
from phalanx.spec.strategy.spec import Strategy


def kill_cost(
    question: Question, kill: Kill, step_s: float, at_s: float, stopped_ranks: int, last_end_s: float
) -> KilledStep:
    """Return what a kill costs under each kind of restart: one of software if a process dies, of hardware if a node
    does. Saves come at the best interval of that kind, and the kill at a random moment between two of them. Raises
    InputError."""
    trained = job_of_question(question, step_s, None)
    restarts, interval, taken = [], 0.0, dict[str, str]()
    for kind in presets.RESTARTS.values():
        premise = premise_of(trained, Conditions(restart=kind.name))
        cause = next(c for c in premise.causes if c.takes_node == kill.takes_node and c.name != "silent")
        again = (premise.interval_s + premise.saving.stall_s) / 2 + premise.saving.lag_s + at_s
        restart = cause.restart_s + cause.wait_s
        hours = trained.gpus * (cause.detect_s + restart + again) / 3600
        restarts.append(Restart(kind.name, cause.detect_s, restart, again, hours))
        interval = interval or premise.interval_s
        taken |= {t.what: f"{t.what}: {t.value} ({t.source})" for t in premise.taken if t.what in _COMMON_PRESETS}
    return KilledStep(
        what=f"{'node' if kill.takes_node else 'rank'} {kill.number}",
        at_s=at_s,
        stopped_ranks=stopped_ranks,
        all_stopped_s=max(last_end_s - at_s, 0.0),
        interval_s=interval,
        restarts=tuple(restarts),
        taken=tuple(taken.values()),
    )


_COMMON_PRESETS = ("failures", "storage", "spares")
"""Presets that every kind of restart has in common."""


def losses_under(given: Conditions | str) -> Losses:
    """Return a function from a layout to its losses. `given`: conditions, or a line of them. Raises InputError."""
    conditions = conditions_in(given) if isinstance(given, str) else given

    def losses(p: Pricing, s: Strategy, step_s: float) -> TrainingLosses:
        t = job_of_strategy(p, s, step_s, conditions.checkpoint_bytes)
        premise = premise_of(t, conditions)
        shares = premise.shares()
        require_progress(premise, float(shares.useful))
        return TrainingLosses(
            effective_share=float(shares.useful),
            saving_share=float(shares.saving),
            again_share=float(shares.lost),
            down_share=float(shares.detection + shares.restart + shares.waiting + shares.planned),
            checkpoint_bytes=t.checkpoint_bytes,
            stall_s=premise.saving.stall_s,
            load_s=premise.load_s,
            interval_s=premise.interval_s,
            spare_gpus=premise.spares * p.cluster.ranks_per_node,
        )

    return losses
