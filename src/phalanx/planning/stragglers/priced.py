"""The step of any stack, priced by formulas, as pipelines that can be run with slow ranks and slow links."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.cost.ledger.pipeline_formulas import ROUNDS, makespans
from phalanx.cost.ledger.policy import sharding as stack_sharding
from phalanx.cost.pipeline_time import Costs, PricedSchedule, price
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import price_with_step
from phalanx.planning.search.refine import chunk_costs, refine, seconds_outside_pipeline
from phalanx.planning.search.strategy_columns import columns_of
from phalanx.planning.stragglers.links import SlowLink, kept_rates
from phalanx.planning.stragglers.lockstep import Lockstep, lockstep
from phalanx.planning.stragglers.pipelines import Delays, Floats, RunnablePipelines
from phalanx.schedule.pipeline.schedules import build, facts_of
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.strategy.spec import Strategy

Ints = npt.NDArray[np.int64]
_UNEVEN_ROUNDS = 64
"""Micro-batches per rank that are run if stages differ: it may take that many until the slowest sets the pace."""
_INSIDE = ("tp", "cp", "ep")


@dataclass(frozen=True)
class PricedPipelines:
    """A strategy's passes, priced for one or several speeds of its links."""

    strategy: Strategy
    micro_batches: int
    passes_s: Floats
    """Seconds of F, I and W of each chunk in a micro-batch, (speeds, 3, chunks); speed 0 is that of healthy links."""
    speed: Ints
    """Index of the speed of each stage's links, (pipelines, pp)."""
    whole_s: Floats
    """Seconds of all passes of a step without a pipeline, (speeds,)."""

    @property
    def stage_of_chunk(self) -> Ints:
        """The pipeline rank of each chunk, (chunks,)."""
        return np.array(rank_of(self.strategy) if self.strategy.pp > 1 else [0], dtype=np.int64)

    @property
    def busy_s(self) -> Floats:
        """Seconds of passes of each stage in a step, (speeds, pp)."""
        if self.strategy.pp == 1:
            return self.whole_s[:, None]
        each = self.passes_s.sum(axis=1)
        by_stage = [np.bincount(self.stage_of_chunk, weights=row, minlength=self.strategy.pp) for row in each]
        return np.asarray(self.micro_batches * np.array(by_stage))

    def costs(self, factors: Floats, speed: Ints) -> Costs:
        """Return the seconds of a pipeline's chunks, given the factors and speeds of its stages, (pp,) each."""
        of_chunk = self.stage_of_chunk
        each = self.passes_s[speed[of_chunk], :, np.arange(len(of_chunk))].T
        return Costs(*(each * factors[of_chunk]).tolist())

    def scheduled(self, pipeline: int, factors: Floats) -> PricedSchedule:
        """Return a pipeline's schedule run action by action, with these factors of its stages, (pp,)."""
        s, facts = self.strategy, facts_of(self.strategy.schedule)
        costs = self.costs(factors, self.speed[pipeline])
        if s.pp > 1:
            chunks = s.virtual if facts.takes_virtual else facts.chunks
            return price(build(s.schedule, s.pp, self.micro_batches, chunks), costs)
        each = sum(sum(part) for part in (costs.forward, costs.input_grad, costs.weight_grad))
        whole = self.whole_s[self.speed[pipeline, 0]] * factors[0] / self.micro_batches / each
        forward, inputs, weights = (
            [float(x * whole) for x in part] for part in (costs.forward, costs.input_grad, costs.weight_grad)
        )
        return price(build("gpipe", 1, self.micro_batches), Costs(forward, inputs, weights))

    def ends(self, factors: Floats) -> Floats:
        """Return the seconds at which pipelines end, (pipelines,), given the factors of stages, (pipelines, pp)."""
        if self.strategy.pp == 1:
            return np.asarray(self.whole_s[self.speed[:, 0]] * factors[:, 0])
        rows, place = np.unique(np.concatenate([factors, self.speed], axis=1), axis=0, return_inverse=True)
        factor, speed = rows[:, : self.strategy.pp], rows[:, self.strategy.pp :].astype(np.int64)
        even = speed.min(axis=1)
        ends = self._makespans(np.ones_like(factor), np.broadcast_to(even[:, None], speed.shape), ROUNDS)
        ends = ends * factor.min(axis=1)
        uneven = (factor.min(axis=1) < factor.max(axis=1)) | (even < speed.max(axis=1))
        if uneven.any():
            run = self._makespans(factor[uneven], speed[uneven], _UNEVEN_ROUNDS)
            # Rounds of equal stages are extrapolated: a pipeline is never faster than its fastest stages.
            healthy = speed[uneven].min(axis=1) == 0
            ends[uneven] = np.where(healthy, np.maximum(run, ends[uneven]), run)
        return np.asarray(ends[place.reshape(-1)])

    def _makespans(self, factors: Floats, speeds: Ints, most: int) -> Floats:
        s, m = self.strategy, [self.micro_batches] * len(factors)
        costs = [self.costs(row, speed) for row, speed in zip(factors, speeds, strict=True)]
        busy = self.busy_s[speeds, np.arange(s.pp)]
        slowest = (busy * factors).max(axis=1) / self.micro_batches
        return np.array(makespans(s.schedule, s.pp, s.virtual, m, costs, slowest.tolist(), most))


def priced_pipelines(pricing: Pricing, s: Strategy, slow: tuple[SlowLink, ...] = ()) -> RunnablePipelines:
    """Return the priced pipelines of a strategy on any stack. Raises InputError if it cannot be priced."""
    ((priced, run),) = refine(pricing, [s])
    at = lockstep(s, stack_sharding(pricing.layout(columns_of([s])), pricing.profile.policy))
    terms = [priced.terms]
    passes = [_passes(pricing, s, run.blocks)]
    whole = [run.makespan]
    speed = np.zeros((at.pipelines, s.pp), dtype=np.int64)
    delays = Delays()
    if slow:
        kept = kept_rates(pricing.cluster, s, slow)

        def at_share(share: Floats) -> tuple[Pricing, dict[str, float]]:
            slower = _with_tiers(pricing, share)
            (own,), _ = price_with_step(slower, [s], [run.blocks if s.pp > 1 else None])
            return slower, own.terms

        of_stage = _stage_minima(at, kept.layers, s.pp)
        different, place = np.unique(of_stage.reshape(-1, of_stage.shape[-1]), axis=0, return_inverse=True)
        number = np.zeros(len(different), dtype=np.int64)
        for i, share in enumerate(different):
            if (share < 1).any():
                slower, own = at_share(share)
                number[i] = len(passes)
                passes.append(_passes(slower, s, run.blocks))
                whole.append(refine(slower, [s])[0][1].makespan if s.pp == 1 else 0.0)
                terms.append(own)
        speed = number[place.reshape(-1)].reshape(speed.shape)
        terms[0] = plain = at_share(np.ones(of_stage.shape[-1]))[1]
        apart, which = np.unique(_stage_minima(at, kept.messages, s.pp).min(axis=1), axis=0, return_inverse=True)
        sent = np.array([at_share(share)[1]["transfers"] for share in apart]) - plain["transfers"]
        reducing = at_share(kept.gradients)[1]
        of_messages = reducing["transfers"] - plain["transfers"]
        delays = Delays(
            messages_s=sent[which.reshape(-1)],
            rest_s={"dp": seconds_outside_pipeline(reducing) - seconds_outside_pipeline(plain) - of_messages},
        )
    pipelines = PricedPipelines(s, s.accumulation(pricing.job), np.array(passes), speed, np.array(whole))
    healthy = replace(pipelines, speed=np.zeros((1, s.pp), dtype=np.int64))
    busy = pipelines.busy_s
    if len(terms) > 1:
        added = (busy - busy[0])[speed, np.arange(s.pp)]
        delays = replace(delays, passes_s={axis: added * part for axis, part in _by_axis(terms, speed).items()})
    return RunnablePipelines(
        lockstep=at,
        busy_s=busy[0],
        run=pipelines.ends,
        alone_s=float(healthy.ends(np.ones((1, s.pp)))[0]),
        outside_s=priced.seconds - run.makespan,
        update_s=float(priced.terms.get("optimizer", 0.0)),
        delays=delays,
        schedule=pipelines.scheduled,
    )


def _passes(pricing: Pricing, s: Strategy, blocks: tuple[int, ...]) -> Floats:
    """Return the seconds of F, I and W of each chunk in a micro-batch, (3, chunks)."""
    c = chunk_costs(pricing, s, blocks)
    return np.array([c.forward, c.input_grad, c.weight_grad])


def _with_tiers(pricing: Pricing, share: Floats) -> Pricing:
    """Return a Pricing with the links of each tier at a share of their rate, (tiers,)."""
    tiers = tuple(
        replace(tier, bytes_per_s_per_gpu_per_direction=tier.bytes_per_s_per_gpu_per_direction * float(part))
        for tier, part in zip(pricing.system.tiers, share, strict=True)
    )
    return replace(pricing, rates=replace(pricing.system, tiers=tiers))


def _stage_minima(at: Lockstep, of_rank: Floats, pp: int) -> Floats:
    """Return the least value over the ranks of each stage, (world, tiers) -> (pipelines, pp, tiers)."""
    result = np.ones((at.pipelines, pp, of_rank.shape[1]))
    np.minimum.at(result, (at.pipeline, at.stage), of_rank)
    return result


def _by_axis(terms: list[dict[str, float]], speed: Ints) -> dict[str, Floats]:
    """Return by axis its part of the seconds that slow links add to a stage's passes, (pipelines, pp)."""
    more = np.array([[t.get(axis, 0.0) - terms[0].get(axis, 0.0) for axis in _INSIDE] for t in terms])
    more = np.maximum(more, 0.0)
    parts = more / np.maximum(more.sum(axis=1, keepdims=True), 1e-300)
    return {axis: parts[speed, i] for i, axis in enumerate(_INSIDE) if parts[:, i].any()}
