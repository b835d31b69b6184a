"""Effects of a job's number types and optimizer on a stack's constants, which are for AdamW in mixed precision.

A parameter has a weight of w bytes, a gradient of a when accumulated and r when reduced (kept separately where they
differ), a master of o where it is not the weight itself, and k moments of o: two of AdamW, one of SGD with momentum.
Muon differs only for matrices, as does its stack option (option_effects.py).

    level 0   w + o + k o + a + r      1   w + a + r kept, o + k o sharded      3   (o + k o + a) / shards

An update reads the gradient, reads and writes master and moments, and writes the weight: a + 2 o (1 + k) + w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.cost.analytic.profile import Profile
from phalanx.spec.job import DTYPE_BYTES, Job, Precision
from phalanx.spec.optimizers import Optimizer


@dataclass(frozen=True)
class _PerParameter:
    """Bytes of one parameter: `weight`, accumulated `gradient`; `reduced`: the buffer for reducing it in another
    type; `master`, with the optimizer's `moments`; `sent`: a gradient in transit."""

    weight: float
    gradient: float
    reduced: float
    master: float
    moments: float
    sent: float

    @property
    def update(self) -> float:
        """Bytes read and written by an update."""
        return self.gradient + 2 * (self.master + self.moments) + self.weight * (self.master != self.weight)


def _per_parameter(p: Precision, optimizer: Optimizer) -> _PerParameter:
    weight, gradient, sent, master = (
        float(DTYPE_BYTES[t]) for t in (p.compute, p.accumulate_dtype, p.reduce_dtype, p.master_dtype)
    )
    moments = len(optimizer.row.others.held(optimizer.first_decay))
    return _PerParameter(
        weight, gradient, sent * (p.reduce_dtype != p.accumulate_dtype), master, moments * master, sent
    )


_MIXED = _per_parameter(Precision("bfloat16"), Optimizer())


def typed(by: Profile, job: Job) -> Profile:
    """Return a stack's constants under the number types and the optimizer of a job: every count of bytes shifted by
    its difference from AdamW in mixed precision."""
    sizes, usual = _per_parameter(job.precision, job.optimizer), _MIXED
    if sizes == usual:
        return by
    # A master of the weight's own type is the weight, except at level 3, where the shards are the masters.
    apart = job.precision.master_dtype != job.precision.compute
    state = sizes.master * apart + sizes.moments
    more_state = state - (usual.master + usual.moments)
    more_weight, more_gradient = sizes.weight - usual.weight, sizes.gradient + sizes.reduced - usual.gradient
    return replace(
        by,
        whole_bytes=by.whole_bytes + more_weight + more_gradient + more_state,
        kept_bytes=by.kept_bytes + more_weight + more_gradient,
        accumulated_bytes=by.accumulated_bytes + sizes.gradient - usual.gradient,
        reduced_bytes=sizes.reduced,
        shard_bytes=by.shard_bytes + more_state,
        full_shard_bytes=by.full_shard_bytes
        + (sizes.master + sizes.moments + sizes.gradient)
        - (usual.master + usual.moments + usual.gradient),
        gradient_bytes=by.gradient_bytes + sizes.sent - usual.sent,
        parameter_bytes=by.parameter_bytes + more_weight,
        optimizer_bytes=by.optimizer_bytes + sizes.update - usual.update,
    )
