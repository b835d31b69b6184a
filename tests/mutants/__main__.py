"""Breaks drawn lines of each room on purpose, one at a time, runs the tests that reach them, and prints a table.

mutations.py lists what can be broken; coverage says which tests reach a line, when all were run once in a copy.
mutmut makes every mutant of every function and Cosmic Ray runs one command for each: neither draws by room.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from queue import Queue
from subprocess import DEVNULL, Popen
from xml.etree import ElementTree

import pytest
from coverage import CoverageData

from mutants.mutations import places, with_change

ROOT = Path(__file__).parents[2]
HOUSE = "src/phalanx"
ROOMS = sorted(file.parent.name for file in ROOT.glob(f"{HOUSE}/*/__init__.py"))
LIVED, CUT, NOTICED = 0, 90, 1
OUTCOMES = {NOTICED: "noticed", LIVED: "lived", CUT: "cut"}
"""By exit code, of which others have noticed too. `cut` lived until its time was over; what no test reaches lives."""
Mutant = tuple[str, Path, int, str, str]
"""Room, file, line, what is changed, the file's source with it."""
COPIES = 2
"""Mutants that are examined at a time: most tests wait more than they compute."""
QUICK = 25
"""Tests that are run first, in a process of their own: most mutants are noticed before the files of all are read."""
SECONDS, ENDLESS = 120, 240
"""Of processor time, so that a busy machine says the same as a quiet one: of a mutant's tests, after which no other
begins, and of one process, which then does not end. pytest-timeout ends what waits."""


def main() -> None:
    """Print one line for each mutant, then the table by room."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    for name, default in (("--count", 300), ("--seed", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--room", action="append", choices=ROOMS, help="may be repeated")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests, from the root")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and its folder is removed
    rooms, seen = options.room or ROOMS, list[tuple[str, str]]()
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as folder:
        whole, *others = (Path(folder) / str(i) for i in range(COPIES))
        ignored = shutil.ignore_patterns(".git", ".venv", ".hypothesis", "__pycache__", "*_cache")
        shutil.copytree(ROOT, whole, symlinks=True, ignore=ignored)
        recorded = ("--cov", "--cov-context=test", "--cov-report=", "--junitxml=took.xml", "-ojunit_family=xunit1")
        if _tested(whole, f"-n{COPIES}", "--dist=loadfile", *recorded, *options.tests) not in (0, 1):
            raise SystemExit("the tests were not run to their end: no mutant can be examined")
        mutants = drawn(whole, rooms, options.count, options.seed)
        free = Queue[Path]()
        for copy in (whole, *(shutil.copytree(whole, other, symlinks=True) for other in others)):
            free.put(copy)
        with ThreadPoolExecutor(COPIES) as threads:
            outcomes = threads.map(lambda mutant: examined(mutant, whole, free), mutants)
            try:
                for (room, file, line, about, _), (outcome, n) in zip(mutants, outcomes, strict=True):
                    seen.append((room, outcome))
                    print(f"{outcome:8} {n:4} tests {file.relative_to(whole)}:{line} {about}", flush=True)
            finally:
                _print_table(rooms, seen)
                threads.shutdown(wait=False, cancel_futures=True)


def _print_table(rooms: Sequence[str], seen: Sequence[tuple[str, str]]) -> None:
    for room in (*rooms, "all"):
        of = Counter(outcome for r, outcome in seen if room in (r, "all"))
        cells = [f"{of[name]:4} {name}" for name in OUTCOMES.values()]
        print(f"{room:14}", *cells, f"{of['noticed'] / max(1, of.total()):6.0%}")


def drawn(copy: Path, rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return mutants of rooms in turn, so that an interrupted examination was of all rooms."""
    shares = [count // len(rooms) + (i < count % len(rooms)) for i in range(len(rooms))]
    turns = zip_longest(*(list(_of_room(copy, room, n, seed)) for room, n in zip(rooms, shares, strict=True)))
    return [mutant for turn in turns for mutant in turn if mutant is not None]


def _of_room(copy: Path, room: str, count: int, seed: int) -> Iterator[Mutant]:
    """Yield mutants of any file of a room and, in it, any kind and place. Long files are drawn more often."""
    rng, seen = random.Random(f"{seed} {room}"), set[tuple[Path, int]]()
    sources = {p: p.read_text() for p in sorted((copy / HOUSE / room).rglob("*.py"))}
    while len(seen) < count:
        (path,) = rng.choices(list(sources), [len(s) for s in sources.values()])
        every = list(places(tree := ast.parse(sources[path])))
        kind = rng.choice(sorted({kind for kind, _, _ in every}) or [""])
        place = rng.choice([k for k, (of, _, _) in enumerate(every) if of == kind] or [-1])
        if place < 0 or (path, place) in seen:
            continue
        _, node, changed = every[place]
        about, line = " -> ".join(" ".join(ast.unparse(n).split())[:90] for n in (node, changed)), node.lineno
        with suppress(SyntaxError, ValueError):  # a value in a pattern cannot be an expression
            text = with_change(tree, node, changed)
            seen.add((path, place))
            yield room, path, line, f"{kind}: {about}", text


def examined(mutant: Mutant, whole: Path, free: Queue[Path]) -> tuple[str, int]:
    """Return what the tests of a line say of it, changed in a copy that is free, and how many tests there are."""
    _, file, line, _, text = mutant
    tests, copy, code = tests_of(whole, file, line), free.get(), LIVED
    changed = copy / file.relative_to(whole)
    before = changed.read_text()
    try:
        changed.write_text(text)
        for some in (tests[:QUICK], tests[QUICK:]):
            if some and code == LIVED:
                code = _tested(copy, "-pno:xdist", "-x", "-pmutants.__main__", *some)
    finally:
        changed.write_text(before)
        free.put(copy)
    return OUTCOMES.get(code, OUTCOMES[NOTICED]), len(tests)


def tests_of(copy: Path, file: Path, line: int) -> list[str]:
    """Return the tests for a line: those that reach it, or what is above it in a statement, the quick ones first;
    then the others of their files, which see what a fixture or a cache made for one. Ranks and forked runs are not
    traced: for what no test reaches, all tests of the room are run, or of the commands where it has none."""
    data = CoverageData(copy / ".coverage")
    data.read()
    by_line = data.contexts_by_lineno(str(file))
    nearest = max((n for n in by_line if n <= line), default=0)
    reaching = {name.rpartition("|")[0] for name in by_line.get(nearest, ()) if name}
    passed = (case for case in ElementTree.parse(copy / "took.xml").iter("testcase") if not len(case))
    took = {f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0)) for case in passed}
    room = file.relative_to(copy).parts[2]
    of_room = f"tests/{room if (copy / 'tests' / room).is_dir() else 'cli'}/"
    files = {name.partition("::")[0] for name in reaching} or {of_room}
    able = (name for name in took if name.startswith(tuple(files)))
    return sorted(able, key=lambda name: (name not in reaching, took[name]))


def pytest_configure() -> None:
    """As a plugin of a mutant's tests: a process that computes without end is killed."""
    resource.setrlimit(resource.RLIMIT_CPU, (ENDLESS, ENDLESS))


def pytest_runtest_logstart() -> None:
    """As a plugin: no test begins when the time is over, of this process and what it has waited for."""
    if sum(os.times()[:4]) > SECONDS:
        pytest.exit("the time of a mutant's tests", CUT)


def _tested(copy: Path, *words: str) -> int:
    """Return the exit code of pytest in the copy. Drawn cases are the same in each run."""
    paths = os.pathsep.join(str(copy / folder) for folder in ("src", ".", "tests"))
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
    (copy / "words").write_text("\n".join(words))
    command = [sys.executable, "-m", "pytest", "-pno:cacheprovider", "@words"]
    process = Popen(command, cwd=copy, env=env, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError):  # and what it started
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
