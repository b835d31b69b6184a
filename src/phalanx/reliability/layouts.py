"""What failures take of a training, layout by layout: for a search that weighs days with failures, not steps.

On the same GPUs all layouts fail alike. They lose unlike: ZeRO spreads a checkpoint over more writers, parameters
that are their own masters make it smaller, an elastic job of many replicas waits less for a node.
"""

from __future__ import annotations

from phalanx.answers.search.whole_training import Losses
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.training_cost import TrainingLosses
from phalanx.reliability.closed_form import shares
from phalanx.reliability.conditions import Conditions, premise_of, require_progress, trained_on
from phalanx.reliability.conditions_by_name import conditions_in
from phalanx.spec.strategy.spec import Strategy


def losses_under(given: Conditions | str) -> Losses:
    """Return what gives a layout's losses. `given`: conditions, or a line of them. Raises InputError."""
    conditions = conditions_in(given) if isinstance(given, str) else given

    def losses(p: Pricing, s: Strategy, step_s: float) -> TrainingLosses:
        t = trained_on(p, s, step_s, conditions.checkpoint_bytes)
        premise = premise_of(t, conditions)
        of = shares(premise.interval_s, premise.causes, premise.saving, premise.planned)
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
