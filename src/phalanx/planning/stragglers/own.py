"""A step of our own runtime, priced by its program, as pipelines that can be run with slow ranks and slow links.

Its collectives are measured whole, so a slow link slows a whole tier: to the least share of its rate that any group
keeps there, because all groups wait for that one in the end.
"""

from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.hardware.bent import cluster_at_shares
from phalanx.cost.pipeline_time import Costs, PricedSchedule, price
from phalanx.cost.step.predict import predict
from phalanx.cost.step.predict_pipeline import PricedPipeline, price_pipeline
from phalanx.cost.step.terms import terms
from phalanx.planning.stragglers.links import SlowLink, kept_rates
from phalanx.planning.stragglers.lockstep import lockstep
from phalanx.planning.stragglers.pipelines import Delays, Floats, RunnablePipelines
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.schedules import build
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class OwnPipelines:
    """The passes of our own runtime's pipelines, which have equal costs."""

    priced: PricedPipeline

    def scheduled(self, _: int, factors: Floats) -> PricedSchedule:
        """Return the schedule run with these factors of its stages' seconds, (pp,)."""
        s, c = self.priced.priced.schedule, self.priced.costs
        of_chunk = factors[np.array(s.rank_of)]
        forward, inputs, weights = (
            (np.asarray(seconds) * of_chunk).tolist() for seconds in (c.forward, c.input_grad, c.weight_grad)
        )
        return price(s, Costs(forward, inputs, weights, c.transfer, c.overhead, c.pace))

    def ends(self, factors: Floats) -> Floats:
        """Return when pipelines with these factors, (pipelines, pp), end their passes and the communication exposed
        after them, (pipelines,)."""
        rows, place = np.unique(factors, axis=0, return_inverse=True)
        ends = [
            max(
                (times[-1][1] if times else 0.0) + exposed
                for times, exposed in zip(self.scheduled(0, row).times, self.priced.exposed_s, strict=True)
            )
            for row in rows
        ]
        return np.array(ends)[place.reshape(-1)]


def own_pipelines(
    model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy, slow: tuple[SlowLink, ...] = ()
) -> RunnablePipelines:
    """Return the priced pipelines of a strategy in our own runtime."""
    whole = _pipelines(model, cluster, job, s)
    if not slow:
        return whole
    kept = kept_rates(cluster, s, slow)
    least = np.min([kept.layers.min(axis=0), kept.messages.min(axis=0), kept.gradients], axis=0)
    slower = _pipelines(model, cluster_at_shares(cluster, least.tolist()), job, s)
    return replace(
        whole,
        delays=Delays(messages_s=slower.alone_s - whole.alone_s, rest_s={"all": slower.outside_s - whole.outside_s}),
    )


def _pipelines(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> RunnablePipelines:
    at = lockstep(s, sharding_of(s))
    if s.pp > 1:
        views = Layout(model, job, s).stage_views()
        own = OwnPipelines(price_pipeline(views, [terms(view) for view in views], cluster))
        alone, update = float(own.ends(np.ones((1, s.pp)))[0]), max(own.priced.optimizer_s)
        busy = np.array(own.priced.priced.work)
        return RunnablePipelines(at, busy, own.ends, own.scheduled, alone, update, update)
    p, m = predict(model, cluster, job, s), s.accumulation(job)
    passes = float(p.forward_s + p.backward_s)

    def scheduled(_: int, factors: Floats) -> PricedSchedule:
        f, b = (float(x * factors[0] / m) for x in (p.forward_s, p.backward_s))
        return price(build("gpipe", 1, m), Costs([f], [b], [0.0]))

    rest = p.step_time_s - passes
    return RunnablePipelines(
        at, np.array([passes]), lambda f: passes * f[:, 0], scheduled, passes, rest, p.optimizer_s
    )
