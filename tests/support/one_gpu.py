"""What is predicted of a step on one GPU of a preset, beside which measured ones are held."""

from typing import NamedTuple

from phalanx.cost.analytic.estimate import estimate
from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict import predict
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


class Predicted(NamedTuple):
    """A step of one micro-batch in bf16."""

    strategy: Strategy
    job: Job
    exact_ms: float
    formulas_ms: float
    peak_bytes: int


def predicted(model: ModelSpec, cluster: str, line: str) -> Predicted:
    """Predict a step, of sequences as long as the model takes, by both prices and the ledger."""
    strategy, one = make_strategy(line), preset(cluster, 1)
    assert strategy is not None
    job = Job(strategy.micro_batch, model.max_seq, Precision("bfloat16"), clip=1.0)
    exact = predict(model, one, job, strategy).step_time_s
    by_formulas = float(estimate(model, one, job, strategy, "phalanx").seconds)
    peak = expand(Layout(model, job, strategy).rank_view(0)).peak_bytes
    return Predicted(strategy, job, exact * 1e3, by_formulas * 1e3, peak)
