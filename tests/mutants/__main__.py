"""Draws mutants by room, runs the tests of their lines, prints a table: `python -m mutants --count N --seed S`."""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

# What every run of tests imports: they are forked with it. Nothing of phalanx, whose files change.
import hypothesis
import numpy
import pytest
import torch._dynamo
import transformers

from mutants.covering import Covering, covering, environment, nearest
from mutants.mutations import Mutant, mutants

__all__ = ["hypothesis", "numpy", "torch", "transformers"]
ROOT = Path(__file__).parents[2]
STORE = ROOT / ".mutants"
ROOMS = ("frameworks", "training", "cost", "schedule", "spec", "planning", "runtime", "nn", "observation", "serving")
LONGEST_S = 240.0
"""A run of tests that takes longer has noticed: it does not end."""
MOST_BYTES = 16 * 2**30
FAILED = ".failed"


def main() -> None:
    """Print one line for each mutant, then the table."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", action="append", choices=ROOMS, help="may be repeated")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and its folder is removed
    rooms = options.room or ROOMS
    counts: Counter[tuple[str, str]] = Counter()
    lived = []
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", ".mutants", "__pycache__", ".*_cache", ".hypothesis", "runs"
        )
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        for i, room in enumerate(rooms):
            map_of = covering(room, ROOT, STORE)
            share = options.count // len(rooms) + (i < options.count % len(rooms))
            for mutant in drawn(room, share, random.Random(f"{options.seed} {room}")):
                begin = time.monotonic()
                outcome = examined(mutant, map_of, copy)
                counts[room, outcome] += 1
                said = f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.before[:90]} -> {mutant.after[:90]}"
                print(f"{outcome:9} {time.monotonic() - begin:4.0f} s {said}", flush=True)
                lived += [f"{outcome:9} {said}"] if outcome in ("lived", "no test") else []
    print(table(counts, rooms), *lived, sep="\n")


def drawn(room: str, count: int, rng: random.Random) -> Iterator[Mutant]:
    """Yield mutants of a room: of any file and, in it, any kind and place. Long files are drawn more often."""
    files = sorted((ROOT / "src/phalanx" / room).rglob("*.py"))
    sources = {str(p.relative_to(ROOT)): p.read_text() for p in files}
    drawn: set[tuple[str, int, str]] = set()
    while len(drawn) < count:
        (file,) = rng.choices(list(sources), [len(s) for s in sources.values()])
        every = list(mutants(file, sources[file]))
        if not every:
            continue
        kind = rng.choice(sorted({m.kind for m in every}))
        mutant = rng.choice([m for m in every if m.kind == kind])
        key = (mutant.file, mutant.line, mutant.after)
        if key not in drawn:
            drawn.add(key)
            yield mutant


def examined(mutant: Mutant, map_of: Covering, copy: Path) -> str:
    """Return what became of a mutant: noticed, endless, lived, no test; invalid: its tests fail without it."""
    path = copy / mutant.file
    tests = map_of.tests(ROOT / mutant.file, mutant.line) or nearest(path, copy)
    if not tests:
        return "no test"
    before, times = path.read_text(), path.stat()
    path.write_text(mutant.source)
    try:
        code = _run(tests, copy)
    finally:
        path.write_text(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if code:
        failed = copy / FAILED
        alone = (failed.read_text(),) if failed.exists() else tuple(tests)
        return "noticed" if _holds(alone, copy) else "invalid"
    return "lived" if code == 0 else "endless"


@cache
def _holds(tests: tuple[str, ...], copy: Path) -> bool:
    """Whether tests pass on the copy as it is."""
    return _run(tests, copy) == 0


class _Failure:
    """Leaves the name of the test that failed."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            Path(FAILED).write_text(report.nodeid)


def _run(tests: Sequence[str], copy: Path) -> int | None:
    """Run tests in a forked process; return pytest's exit code, None if they did not end."""
    (copy / FAILED).unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _live(tests, copy)
    deadline = time.monotonic() + LONGEST_S
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
    finally:
        with suppress(ProcessLookupError, ChildProcessError):  # the leader of its session, and whatever it started
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _live(tests: Sequence[str], copy: Path) -> None:
    os.setsid()
    code = 3
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        os.chdir(copy)
        os.environ.update(environment(copy) | {"PYTHONDONTWRITEBYTECODE": "1"})
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy / "src"), str(copy), *(p for p in sys.path if not p.startswith(str(ROOT / "tests")))]
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        code = int(pytest.main(["-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests], plugins=[_Failure()]))
    finally:
        os._exit(code)


def table(counts: Counter[tuple[str, str]], rooms: Sequence[str]) -> str:
    """Return the table by room."""
    heads = "".join(f" {head:>7}" for head in ("mutants", *_OUTCOMES))
    lines = [f"{'room':12}{heads} {'score':>6}"]
    for room in (*rooms, "all"):
        of = {name: sum(n for (r, o), n in counts.items() if o == name and room in (r, "all")) for name in _OUTCOMES}
        total = sum(of.values()) - of["invalid"]
        score = f"{100 * (of['noticed'] + of['endless']) / total:.0f} %" if total else "-"
        counted = "".join(f" {n:7}" for n in (total, *of.values()))
        lines.append(f"{room:12}{counted} {score:>6}")
    return "\n".join(lines)


_OUTCOMES = ("noticed", "endless", "lived", "no test", "invalid")


if __name__ == "__main__":
    main()
