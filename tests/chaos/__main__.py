"""Draws cases until the time is up, and prints how many held: `python -m chaos --minutes 60 --seed 0`."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.forked_cli import phalanx
from support.struck_runs import folder_of_runs

from chaos.cases import FAMILIES, FILES, LAUNCHER_STROKES, RANK_STROKES, Case, every, world
from chaos.run import Broken, Runs, Skipped


def main() -> int:
    """Run cases; return the exit code: 1 if something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and its folder is removed
    deadline = time.monotonic() + 60 * options.minutes
    cases = every()
    random.Random(options.seed).shuffle(cases)
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        here = Path(folder) / "here"  # what launchers write lies beside it
        here.mkdir()
        folder_of_runs(here)
        os.environ["PHALANX_CACHE"] = str(here / "cache")
        for ranks in sorted({world(family) for family in FAMILIES}):
            _measure(here, ranks)
        runs = Runs(here)
        for case in cases:
            if time.monotonic() > deadline:
                break
            counts[_row(case), _outcome(runs, case)] += 1
    print(table(counts, len(cases)))
    return 1 if any(outcome == "broken" for _, outcome in counts) else 0


def _measure(here: Path, ranks: int) -> None:
    """Fill the cache with this machine, measured briefly."""
    instead = {"phalanx.measure.worker": "support.tiny_measurement"}
    code, _, err = phalanx(here, "measure --ranks", str(ranks), instead=instead)
    if code:
        raise SystemExit(err)


def _outcome(runs: Runs, case: Case) -> str:
    begin = time.monotonic()
    try:
        runs.examine(case)
        outcome, why = "held", ""
    except Skipped as reason:
        outcome, why = "skipped", f": {reason}"
    except (Broken, AssertionError, OSError, ValueError) as error:
        outcome, why = "broken", f": {error}".strip()
    print(f"{outcome:7} {time.monotonic() - begin:5.1f} s  {case}{why}", file=sys.stderr, flush=True)
    return outcome


def _row(case: Case) -> str:
    if case.victim == "files":
        return case.stroke
    return f"{case.stroke} to {'the launcher' if case.victim == 'launcher' else 'a rank'}"


def table(counts: Counter[tuple[str, str]], possible: int) -> str:
    """Return the counts as a Markdown table."""
    kinds = [f"{s} to a rank" for s in RANK_STROKES] + [f"{s} to the launcher" for s in LAUNCHER_STROKES]
    lines = ["| what is done | cases | held | broken | skipped |", "|---|---|---|---|---|"]
    for row in (*kinds, *FILES):
        numbers = [counts[row, outcome] for outcome in ("held", "broken", "skipped")]
        if sum(numbers):
            lines.append(f"| {row} | {sum(numbers)} | {' | '.join(map(str, numbers))} |")
    totals = [sum(n for (_, o), n in counts.items() if o == outcome) for outcome in ("held", "broken", "skipped")]
    lines.append(f"| **all**, of {possible:,} possible | {sum(totals)} | {' | '.join(map(str, totals))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
