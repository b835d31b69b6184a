"""A training step of one rank, written once, as terms.

A Term represents all events of one template in the step: count, bytes, work, and bytes that each allocates and frees.
The price sums terms (predict.py); `expand.expand` turns the same terms into ordered events.
"""

from __future__ import annotations

from phalanx.cost.compute import unit_work
from phalanx.cost.memory.state import update_bytes, updated_elements
from phalanx.cost.step.gradient_terms import data_parallel_terms
from phalanx.cost.step.layer_terms import layer_terms, partial_gradients, pipeline_messages
from phalanx.cost.step.pass_terms import pass_terms
from phalanx.cost.step.term import Term
from phalanx.schedule.event import Event
from phalanx.schedule.layout import RankView
from phalanx.spec.job import DTYPE_BYTES
from phalanx.spec.model.spec import ModelSpec, expert_layers
from phalanx.spec.strategy.spec import Strategy


def terms(view: RankView) -> tuple[Term, ...]:
    """Return the terms of a rank's step: the passes of its units, communication inside their layers, the collectives
    of gradients and parameters, the messages between pipeline ranks, metrics, and the optimizer with its
    communication."""
    return (
        *pass_terms(view),
        *layer_terms(view),
        *partial_gradients(view),
        *data_parallel_terms(view),
        *pipeline_messages(view),
        _metrics(view),
        _optimizer(view),
        *_matrices(view),
    )


def metrics(spec: ModelSpec, s: Strategy) -> int:
    """Return the number of elements in the fused fp64 all-reduce of a step: loss sum, target tokens, stop flag,
    non-finite flag; the squared gradient norm where ranks have parts of the gradients; and for each layer with
    experts the load of every expert, dropped rows, and two losses."""
    loads = len(expert_layers(spec)) * (spec.experts.count + 3) if spec.experts else 0
    return 4 + s.gradients_differ_by_rank + loads


def _metrics(view: RankView) -> Term:
    s, active = view.strategy, int(view.strategy.world > 1)
    event = Event("collective", "all_reduce", "opt", "metrics", "world", dtype="float64")
    return Term(event, count=active, bytes=active * metrics(view.model, s) * 8)


def _optimizer(view: RankView) -> Term:
    elements, local, s = updated_elements(view.local, view.strategy), view.local, view.strategy
    alloc = update_bytes(view, elements)
    event = Event("compute", "optimizer", "opt", dtype=view.job.precision.master_dtype)
    work = unit_work.optimizer(elements, view.job)
    if view.job.optimizer.row.whole:
        flops = sum(x.most_flops for x in view.exchanges)  # the others wait for the rank that has most
        work = unit_work.optimizer(elements, view.job, updated_elements(local, s, matrices=True), flops)
    return Term(event, count=1, work=work, alloc=alloc, free=alloc)


def _matrices(view: RankView) -> list[Term]:
    """Return the terms of gathering whole matrices for the update, and of scattering the results."""
    dtype, terms = view.job.precision.compute, []
    for x in view.exchanges:
        if x.axis:
            event = Event("collective", "all_to_all", "opt", x.unit, x.axis, dtype=dtype)
            terms.append(Term(event, 2, bytes=(x.held_elements + x.owned_elements) * DTYPE_BYTES[dtype]))
    return terms
