"""Seconds of a step from lines of a log that count steps and have a clock: a time stamp, or the time since the start.

Records of ms-swift and LLaMA-Factory, and loops of one's own, print no time of a step. A line is of a step where it
names its number. Clocks of whole seconds are read over 20 s at least: the step is then within a tenth.
"""

import re
from collections.abc import Iterator
from datetime import datetime

COUNT = re.compile(
    r"(?<!micro_)(?<!max_)(?<!total_)(?<!eval_)(?<!warmup_)(?:iteration|iter|steps?|batch)(?:/max_steps)?"
    r"[\s:=\"'#]+(\d{1,12})",
    re.IGNORECASE,
)
"""The number of a step in a line."""
_STAMP = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T,]+(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_MONTH_FIRST = re.compile(r"(\d\d)/(\d\d)/(\d{4})[ ,]+(\d\d):(\d\d):(\d\d)()")
_ELAPSED = re.compile(
    r"elapsed_time[\"']?[:=\s]+[\"']?(?:(\d+) days?,? )?"
    r"(?:(\d+):(\d\d):(\d\d)|(?:(\d+)d ?)?(?:(\d+)h ?)?(?:(\d+)m ?)?(\d+(?:\.\d+)?)s)"
)
"""LLaMA-Factory, src/llamafactory/train/callbacks.py (timedelta), and ms-swift, swift/utils (format_time)."""
_LEAST_S = 20.0
_LONGEST = 20_000  # characters of a line


def seconds_of_steps(text: str) -> list[float]:
    """Return the mean seconds of a step in each stretch of the last run in a log, in order; empty: no two lines have
    a number and a clock."""
    points: list[tuple[int, float]] = []
    for step, at in _points(text):
        if points and (step < points[-1][0] or at < points[-1][1]):
            points = []  # another run begins
        if not points or step > points[-1][0]:
            points.append((step, at))
    stretches, start = [], 0
    for i, (step, at) in enumerate(points):
        first, start_s = points[start]
        if at - start_s >= _LEAST_S:
            stretches.append((at - start_s) / (step - first))
            start = i
    if not stretches and len(points) > 1 and points[-1][1] > points[0][1]:
        (first, start_s), (last, end_s) = points[0], points[-1]
        stretches.append((end_s - start_s) / (last - first))
    return stretches


def _points(text: str) -> Iterator[tuple[int, float]]:
    """Yield (number of a step, seconds of the clock) of each line that has both."""
    for line in re.split(r"[\r\n]+", text):
        count = COUNT.search(line[:_LONGEST])
        at = _clock(line[:_LONGEST]) if count else None
        if count and at is not None:
            yield int(count[1]), at


def _clock(line: str) -> float | None:
    if elapsed := _ELAPSED.search(line):
        days, *both = (float(part or 0) for part in elapsed.groups())
        hours, minutes, seconds, more_days, *parts = both
        colons = (days + more_days) * 86400 + hours * 3600 + minutes * 60 + seconds
        return colons + parts[0] * 3600 + parts[1] * 60 + parts[2]
    if stamp := _STAMP.search(line):
        year, month, day, *clock, fraction = stamp.groups()
    elif stamp := _MONTH_FIRST.search(line):
        month, day, year, *clock, fraction = stamp.groups()
    else:
        return None
    try:
        at = datetime.fromisoformat(f"{year}-{month}-{day}T{':'.join(clock)}")
    except ValueError:  # no such day
        return None
    return (at - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")
