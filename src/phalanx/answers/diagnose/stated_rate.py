"""How fast a step is, as people say it: 4.3s, 230TFLOP/s, 9600 tokens/s/GPU, 46% MFU, 0.4 samples/s, 2.5 it/s."""

import re
from dataclasses import dataclass

from phalanx.answers.prediction import Prediction
from phalanx.spec.errors import InputError

_NUMBER = r"(?P<number>\d[\d,]*\.?\d*|\.\d+) ?(?P<thousands>k)? ?"
_PER_GPU = r"(?P<each>(?:/| per )(?:gpu|device|chip|card))?"
_PER_S = r"(?:/ ?s(?:ec(?:ond)?)?| per second|ps)"
_UNITS = {
    "s": r"s(?:ec(?:onds?)?)?(?:/(?:it|iter|step))?",
    "ms": r"ms(?:/(?:it|iter|step))?",
    "TFLOP/s": rf"t(?:era)?flop(?:{_PER_S}|s|s/s){_PER_GPU}",
    "tokens/s": rf"(?:tok(?:en)?s?{_PER_S}|tps){_PER_GPU}(?P<all>/all)?",
    "tokens/s/GPU": r"tgs",
    "samples/s": rf"(?:samples?|sequences?|examples?){_PER_S}",
    "steps/s": rf"(?:steps?|it|iters?|iterations?){_PER_S}",
    "MFU": r"%(?: ?mfu)",
}
_PATTERNS = {unit: re.compile(_NUMBER + pattern, re.IGNORECASE) for unit, pattern in _UNITS.items()}


@dataclass(frozen=True)
class StatedRate:
    """A step's seconds (`s`), or a rate: TFLOP/s of a GPU, tokens/s, samples/s, steps/s, MFU."""

    word: str
    number: float
    unit: str
    of_all: bool = False
    """Whether tokens/s are said to be of all GPUs."""


def stated_rate(word: str) -> StatedRate | None:
    """Return what a word says; None for the name of a file. Raises InputError for 0."""
    for unit, pattern in _PATTERNS.items():
        if (match := pattern.fullmatch(word.strip())) is None:
            continue
        parts = match.groupdict()
        number = float(parts["number"].replace(",", "")) * (1e3 if parts["thousands"] else 1.0)
        if number == 0:
            raise InputError("FILE", word, "is no step's time and no rate", "give a number above 0")
        if unit == "ms":
            return StatedRate(word, number / 1e3, "s")
        if unit == "MFU":
            return StatedRate(word, number / 100, unit)
        each = unit == "tokens/s" and parts.get("each")
        return StatedRate(word, number, "tokens/s/GPU" if each else unit, bool(parts.get("all")))
    return None


def seconds_at(rate: StatedRate, prediction: Prediction | None) -> float:
    """Return the seconds of a step at a rate. Raises InputError without the plan that it is of, and for tokens/s of
    several GPUs that may be of one."""
    if rate.unit == "s":
        return rate.number
    if rate.unit == "steps/s":
        return 1 / rate.number
    if prediction is None or (rate.unit in ("TFLOP/s", "MFU") and prediction.model_flops is None):
        raise InputError("FILE", rate.word, "is a rate of an unknown step", "name the plan and its stack")
    asked = prediction.question
    gpus = asked.gpus
    if rate.unit == "samples/s":
        return asked.global_batch / rate.number
    if rate.unit == "TFLOP/s":
        return (prediction.model_flops or 0.0) / (rate.number * 1e12 * gpus)
    if rate.unit == "MFU":
        return (prediction.mfu or 0.0) * prediction.step_time_s / rate.number
    if rate.unit == "tokens/s" and not rate.of_all and gpus > 1:
        said = f"{rate.number:g}tokens/s"
        raise InputError("FILE", rate.word, f"is of one GPU or of all {gpus}", f"write {said}/gpu or {said}/all")
    return asked.global_batch * asked.seq / (rate.number * (gpus if rate.unit == "tokens/s/GPU" else 1))
