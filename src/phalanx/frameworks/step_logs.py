"""The time of a training step from the log of a framework (step_logs.toml has the patterns of its lines).

The first steps compile, tune and fill caches; later ones are sometimes delayed by a checkpoint or an evaluation. So
the time is the median of the second half of the steps, with its spread and the number of delayed steps.
"""

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from phalanx.frameworks.step_clocks import COUNT, seconds_of_steps
from phalanx.spec.errors import InputError

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6}
_FAR = 1.5
"""A step that takes this many times the median is counted as delayed."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step in a log."""

    seconds: float
    """The median of the steady steps."""
    printed_by: str
    """The framework whose line it is; empty: no line has a time, and the lines' clock says it."""
    steps: int
    """Steady steps that were read."""
    dropped: int
    """Earlier steps, in which the run warms up."""
    spread: float
    """Half the range between the 10th and the 90th percentile, relative to the median."""
    delayed: int
    """Steady steps that took more than 1.5 times the median."""
    delay_s: float = 0.0
    """Seconds by which the delayed steps lengthen the mean of the steady ones."""
    tflops: float | None = None
    """TFLOP/s per GPU as the log prints them, in its own count of FLOPs."""
    runs: int = 1
    """Runs in the log, of which the last was read; a run begins where the number of the step falls."""

    @property
    def note(self) -> str:
        """How the seconds were obtained, in one line."""
        late = f", {self.delayed} delayed" if self.delayed else ""
        last = f" of the last of {self.runs} runs" if self.runs > 1 else ""
        of = f"steps{last} as {self.printed_by} prints them" if self.printed_by else "stretches by the lines' clock"
        warm_up = f"after {self.dropped} of warm-up{late}"
        return f"{self.seconds:.4g} s: the median of {self.steps} {of}, {warm_up}; ± {100 * self.spread:.1f} %"


@cache
def _lines(of: str = "line") -> tuple[tuple[str, re.Pattern[str]], ...]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())[of]
    return tuple((row["name"], re.compile(row["pattern"])) for row in rows)


def prints_steps(text: str) -> bool:
    """Whether a log says how long a step took, or at which rate."""
    return any(pattern.search(text) for _, pattern in _lines()) or bool(seconds_of_steps(text))


def step_time(text: str, name: str, batch: int = 0, seq: int = 0, gpus: int = 0) -> StepTime:
    """Return the time of a step in the text of a log. `name`: of the log, for errors; `batch` (sequences of a step),
    `seq` and `gpus`: sizes that turn rates into seconds. Raises InputError for a log without known lines, and for a
    rate without the sizes that it needs."""
    for printed_by, pattern in _lines():
        matches = list(pattern.finditer(text))
        bars = "of" in pattern.groupindex
        if bars:
            most = max((int(m["of"]) for m in matches), default=0)
            matches = [m for m in matches if int(m["of"]) == most]
        if matches:
            starts = [0] if bars else _starts(text, matches)
            text, last = text[matches[starts[-1]].start() :], matches[starts[-1] :]
            units = [m.lastgroup or "" for m in last]  # a bar turns from s/it to it/s
            sizes = (batch, seq, gpus)
            times = np.array([_seconds(m[u], u, name, sizes) + _parts(m) for m, u in zip(last, units, strict=True)])
            rates = [float(m[1].replace(",", "")) for _, p in _lines("rate") for m in p.finditer(text)]
            tflops = float(np.median(rates[len(rates) // 2 :])) if rates else None
            return replace(_steady(printed_by, times), tflops=tflops, runs=len(starts))
    if stretches := seconds_of_steps(text):
        return _steady("", np.array(stretches))
    known = ", ".join(dict.fromkeys(line for line, _ in _lines()))
    remedy = f"known lines: {known}; or lines with a step's number and a time stamp; or FILE=SECONDS"
    raise InputError("log", name, "prints no time of a step that is known", remedy)


def _starts(text: str, matches: list[re.Match[str]]) -> list[int]:
    """Return the indices of matches at which a run begins: the first, and those whose step number falls."""
    starts, before = [0], -1
    for i, match in enumerate(matches):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.end()]
        number = COUNT.search(line)
        now = int(number[1]) if number else before
        if now < before:
            starts.append(i)
        before = now
    return starts


def _parts(match: re.Match[str]) -> float:
    """Return the seconds of the parts of a step before its last."""
    return sum(float(value) / 1e3 for name, value in match.groupdict().items() if re.fullmatch(r"ms\d", name))


def _seconds(word: str, unit: str, name: str, sizes: tuple[int, int, int]) -> float:
    number = float(word.rstrip("KM").replace(",", "")) * _UNITS[word[-1] if word[-1] in _UNITS else ""]
    batch, seq, gpus = sizes
    if unit == "ms":
        return number / 1e3
    if unit == "s":
        return number
    if number <= 0:
        raise InputError("log", name, f"prints a rate of {number:g}", "is this the log of a training?")
    if unit == "steps":
        return 1 / number
    needed = (("samples", batch),) if unit == "samples" else (("tokens", batch), ("seq", seq), ("gpus", gpus))
    if not all(size for _, size in needed):
        raise InputError("log", name, f"prints {unit} per second, which need the batch", "name the configuration too")
    return batch / number if unit == "samples" else batch * seq / (number * gpus)


def _steady(printed_by: str, seconds: np.ndarray) -> StepTime:
    """Return the median of the second half, or of the only step."""
    start = len(seconds) // 2
    steady = seconds[start:]
    median = float(np.median(steady))
    low, high = np.percentile(steady, [10, 90])
    late = steady > _FAR * median
    spread = float(high - low) / 2 / median if median else 0.0
    delay = float((steady[late] - median).sum()) / len(steady)
    return StepTime(median, printed_by, len(steady), start, spread, int(late.sum()), delay)
