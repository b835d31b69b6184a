"""Whether a GPU's model FLOP/s are normal: compared with the plan and published runs, and how a log counts FLOPs."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from phalanx.answers.prediction import Prediction
from phalanx.answers.question.question import Question
from phalanx.cost.analytic.chips import chip_name
from phalanx.cost.ledger.flops import model_flops
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.errors import InputError
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.validate import from_row, models, records, systems
from phalanx.validate.stacks import number_format


@dataclass(frozen=True)
class PublishedRates:
    """MFU of published runs on the same chip in the same number format, of models of a similar size."""

    runs: int
    low: float
    """The 10th percentile."""
    median: float
    high: float
    """The 90th percentile."""


@dataclass(frozen=True)
class FlopRate:
    """FLOP/s of a GPU, and how they are counted."""

    tflops: float
    """Model TFLOP/s as Phalanx counts them: without recomputation, attention over the full square."""
    planned_tflops: float
    mfu: float
    """Of the peak in bf16."""
    planned_mfu: float
    published: PublishedRates | None = None
    stated_tflops: float | None = None
    """As the log, or the user, states them."""
    stated_count: str = ""
    """Words for the count of FLOPs that the stated rate agrees with."""


_ALIKE, _LEAST_RUNS = 2.0, 5
"""Models are alike up to this ratio of their parameters; fewer runs than this are no comparison."""
_AGREES = 0.03
"""Share by which two counts of FLOPs may differ and agree."""


@cache
def published_rates(chip: str, params: int, experts: bool, products: str) -> PublishedRates | None:
    """Return the MFU of published runs on a chip of similar models, with products in a number format; None where they
    are too few."""
    rates = []
    for row in records.load(records.RUNS):
        size = row.number("params_b")
        if not size or not 1 / _ALIKE < size * 1e9 / params < _ALIKE or row.moe != experts:
            continue
        try:
            if systems.chip_name(row) != chip or number_format(row) != products:
                continue
            case = from_row.case(row)
        except (models.Unspecified, InputError):
            continue
        if case.measured_s:
            ranks = float(case.layout.world)
            flops = float(model_flops(case.shape, case.layout))
            rates.append(flops / (case.measured_s * ranks * float(case.system.peak_bf16)))
    if len(rates) < _LEAST_RUNS:
        return None
    low, median, high = (float(x) for x in np.percentile(rates, (10, 50, 90)))
    return PublishedRates(len(rates), low, median, high)


def _peak_over_half(chip: str, products: str) -> float:
    """Return a chip's peak rate of products in a number format over its peak in 16 bits, at least 1."""
    peak = NUMBER_FORMATS[products].peak if products in NUMBER_FORMATS else None
    return max(1.0, (getattr(CHIPS[chip], peak or "half") or 0.0) / CHIPS[chip].half)


def flop_rate(
    question: Question | None, prediction: Prediction | None, step_s: float, stated: float | None
) -> FlopRate | None:
    """Return the rates, with the count of FLOPs that a stated one agrees with. Raises InputError for a step that is
    shorter than its products can be."""
    if question is None or prediction is None or prediction.estimate is None:
        return None
    flops, gpus = prediction.model_flops or 0.0, float(prediction.estimate.layout.world)
    planned_mfu, p = prediction.mfu or 0.0, question.pricing
    chip = chip_name(p.cluster.device.name)
    rate = FlopRate(
        tflops=flops / step_s / gpus / 1e12,
        planned_tflops=flops / prediction.step_time_s / gpus / 1e12,
        mfu=planned_mfu * prediction.step_time_s / step_s,
        planned_mfu=planned_mfu,
        published=published_rates(chip, p.model.parameter_count, bool(p.model.experts), p.number_format),
    )
    share = (prediction.six_n_flops or 0.0) / flops * rate.mfu if flops else 0.0
    if chip in CHIPS and share > (most := _peak_over_half(chip, p.number_format)):
        alone = f"the parameters' products alone would be {share / most:.0%} of what the chips can"
        remedy = "name that job's model, GPUs, batch and precision"
        raise InputError("FILE", f"a step of {step_s:.4g} s", f"is not of this plan: {alone}", remedy)
    if stated is None:
        return rate
    counts = {
        "model FLOPs with attention over the full square, as here": flops,
        "6 FLOPs per parameter and token, without attention": prediction.six_n_flops or 0.0,
        "what the chips execute, recomputation included": flops * (prediction.hfu or 0.0) / (planned_mfu or 1.0),
    }
    implied = stated * 1e12 * gpus * step_s
    name, nearest = min(counts.items(), key=lambda item: abs(item[1] / implied - 1))
    said = name if abs(nearest / implied - 1) < _AGREES else f"{implied / flops - 1:+.0%} of the FLOPs counted here"
    return replace(rate, stated_tflops=stated, stated_count=said)
