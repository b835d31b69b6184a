"""Verify a strategy in this process."""

from phalanx.observation.trainer.verify import verify
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


def prove(model: ModelSpec, job: Job, strategy: Strategy) -> None:
    for found in verify(model, job, strategy):
        assert found.proved, (found.ranks, found.failed, [str(d) for d in found.differences])
