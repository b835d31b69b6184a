"""The rule that every input is held to.

Exit 0 with numbers that are finite, not negative and agree with each other; or exit 2 with one line that names the
field; exit 1 where a command examined something and it failed. Never a traceback, never a hang, never more memory
than `MEMORY`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.fuzz.commands import Case

SECONDS = 25.0
"""CPU time that a case may take."""
MEMORY = 2 * 2**30
"""Bytes that a case may allocate."""
_FIELD = re.compile(r"error: [^\s:=].{0,130}?( = .{1,90}?)?: \S.*", re.DOTALL)
_MAY_FAIL = (
    *("lint", "verify", "pipeline", "collectives", "parity", "train", "generate", "runs", "compare"),
    *("check", "diagnose", "observe"),
)
_SIGNED = re.compile(
    r"error|difference|deviation|bias|gap|off|loss|slack|gain|saved|change|value|low|high|grad|computing|turns|waiting_share|terms_s.lengths"
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    """Exit code; negative for a signal."""
    out: str
    """Standard output."""
    err: str
    """Standard error."""
    seconds: float
    """CPU time."""
    stopped: str = ""
    """`hang` or `memory`, if it was stopped for that."""


def verdict(case: Case, o: Outcome) -> str:
    """Judge an outcome: `done`, `refused` or `failed`; anything else breaks the rule and says how."""
    if o.stopped:
        return o.stopped
    if "Traceback (most recent call last)" in o.err or "Traceback (most recent call last)" in o.out:
        return "traceback"
    if o.code == 0:
        return _wrong_numbers(case, o.out) or "done"
    lines = [line for line in o.err.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if o.code == 2:
        if len(errors) != 1 or not lines[-1].startswith("error: "):
            return "not one line"
        if not _FIELD.fullmatch(errors[0]):
            return "names no field"
        return "refused" if len(errors[0]) <= 1300 else "long line"
    if o.code == 1 and (case.words[0] in _MAY_FAIL or "--assert" in case.words or "--strict" in case.words):
        return "failed"
    return f"exit {o.code}"


def _wrong_numbers(case: Case, out: str) -> str:
    own = case.words[: case.words.index("--")] if "--" in case.words else case.words  # the rest is a program's
    if "--help" in own:  # it names values
        return ""
    if "--json" not in own:
        words = re.findall(r"(?<![\w.-])-?(?:nan|inf)(?![\w-])", out)
        return f"{words[0]} in a table" if words and "nan" not in str(case) and "inf" not in str(case) else ""
    try:
        result = json.loads(out, parse_constant=lambda name: float(name.replace("Infinity", "inf")))
    except ValueError:
        return "no JSON"
    for place, number in _numbers(result):
        name = ".".join(place)
        if not math.isfinite(number):
            return f"{number} in {_general(name)}"
        if number < 0 and not _SIGNED.search(name):
            return f"negative {_general(name)}"
        if re.search(r"(mfu|hfu|_fraction|_share)$", name) and number > 1.000001:
            return f"{_general(name)} above 1"
    if case.words[0] == "predict":
        total = sum(result["terms_s"].values())
        if result["step_time_s"] <= 0 or not math.isclose(total, result["step_time_s"], rel_tol=1e-6):
            return "step time is not the sum of its terms"
        if result["fits"] != (result["memory_bytes"] <= result["usable_bytes"]):
            return "fits contradicts memory"
    rows = (result.get("best"), *result.get("alternatives", ())) if case.words[0] == "plan" else ()
    if any(row["step_time_s"] <= 0 for row in rows if row is not None):
        return "step time is not positive"
    return ""


def _general(name: str) -> str:
    return re.sub(r"\.\d+", "", name)


def _numbers(tree: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(tree, dict | list):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _numbers(inner, (*at, str(key)))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield at, tree
