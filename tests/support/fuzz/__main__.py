"""`python -m support.fuzz --cases 2000 --seed 0`: draw cases, hold each to the rule, print a table of counts."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import support.preload  # noqa: F401 (its imports are made once, not in every case)
from phalanx.measure import this_machine
from support.fuzz.campaign import Tally, campaign, measured, prepared
from support.fuzz.examine import forked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="only commands that take a moment")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and its folder is removed
    with tempfile.TemporaryDirectory(prefix="phalanx-fuzz-") as folder:
        os.environ["PHALANX_CACHE"] = f"{folder}/cache"
        this_machine._measure = measured
        work = prepared(Path(folder) / "work", options.quick)

        def show(tally: Tally) -> None:
            if tally.total % 50 == 0:
                print(f"{tally.total} cases, {len(tally.broken)} break the rule", file=sys.stderr, flush=True)

        tally = campaign(work, options.cases, options.seed, forked, quick=options.quick, progress=show)
    print(tally.table())
    print(f"\n{tally.problems()}")
    sys.exit(bool(tally.broken))


if __name__ == "__main__":
    main()
