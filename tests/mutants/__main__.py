"""Breaks drawn lines of each room on purpose, one at a time, runs the tests that reach them, and prints a table.

mutations.py lists what can be broken; coverage says which tests reach a line, when all were run once in a copy.
mutmut makes every mutant of every function and Cosmic Ray runs one command for each: neither draws by room.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData

from mutants.mutations import places, with_change

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "src/phalanx"
ROOMS = sorted(folder.name for folder in HOUSE.iterdir() if list(folder.glob("*.py")))
OUTCOMES = ("noticed", "lived", "cut")
"""`cut`: lived until the time of its tests was over. What no test reaches lives."""
SECONDS, LONGEST_S = 40.0, 240.0
"""Time of a mutant's tests without it, at most; a run of them that takes the longest has noticed: it does not end."""


def main() -> None:
    """Print one line for each mutant, then the table by room."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    for name, default in (("--count", 300), ("--seed", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--room", action="append", choices=ROOMS, help="may be repeated")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests, from the root")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and its folder is removed
    rooms, found = options.room or ROOMS, list[tuple[str, str, str]]()
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", ".hypothesis", "__pycache__", "*_cache")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        recorded = ("--cov", "--cov-context=test", "--cov-report=", "--junitxml=took.xml", "-ojunit_family=xunit1")
        if _tested(copy, (*recorded, *options.tests), 7200.0) not in (0, 1):
            raise SystemExit("the tests were not run to their end: no mutant can be examined")
        for room, file, line, about, text in drawn(rooms, options.count, options.seed):
            tests, cut = tests_of(copy, file, line)
            (copy / file).write_text(text)
            lived = not tests or _tested(copy, ("-x", *tests), LONGEST_S) == 0
            shutil.copy(ROOT / file, copy / file)
            found.append((room, ("cut" if cut else "lived") if lived else "noticed", f"{file}:{line} {about}"))
            print(f"{found[-1][1]:8} {len(tests):4} tests {found[-1][2]}", flush=True)
    print(f"{'room':14}" + "".join(f" {head:>7}" for head in (*OUTCOMES, "score")))
    for room in (*rooms, "all"):
        of = Counter(outcome for r, outcome, _ in found if room in (r, "all"))
        score = f"{100 * of['noticed'] / of.total():.0f} %" if of else "-"
        print(f"{room:14}" + "".join(f" {cell:>7}" for cell in (*(of[name] for name in OUTCOMES), score)))


def drawn(rooms: Sequence[str], count: int, seed: int) -> Iterator[tuple[str, Path, int, str, str]]:
    """Yield (room, file, line, what is changed, the file's source with it) by room: of any file and, in it, any kind
    and place. Long files are drawn more often."""
    for i, room in enumerate(rooms):
        rng, seen = random.Random(f"{seed} {room}"), set[tuple[Path, int]]()
        sources = {p: p.read_text() for p in sorted((HOUSE / room).rglob("*.py"))}
        while len(seen) < count // len(rooms) + (i < count % len(rooms)):
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
                yield room, path.relative_to(ROOT), line, f"{kind}: {about}", text


def tests_of(copy: Path, file: Path, line: int) -> tuple[list[str], bool]:
    """Return the tests for a line, and whether there are more than time allows: those that reach it, or what is above
    it in a statement, the quick ones first; then the others of their files, which see what a fixture or a cache made
    for one. Ranks and forked runs are not traced: for what no test reaches, all tests of the room are run."""
    data = CoverageData(copy / ".coverage")
    data.read()
    by_line = data.contexts_by_lineno(str(copy / file))
    nearest = max((n for n in by_line if n <= line), default=0)
    reaching = {name.rpartition("|")[0] for name in by_line.get(nearest, ()) if name}
    passed = (case for case in ElementTree.parse(copy / "took.xml").iter("testcase") if not len(case))
    took = {f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0)) for case in passed}
    files = {name.partition("::")[0] for name in reaching} or {f"tests/{file.parts[2]}/"}
    able = (name for name in took if name.startswith(tuple(files)))
    ordered = sorted(able, key=lambda name: (name not in reaching, took[name]))
    within = bisect(list(accumulate(took[name] for name in ordered)), SECONDS)
    return ordered[: max(1, within)], within < len(ordered)


def _tested(copy: Path, words: Sequence[str], longest_s: float) -> int | None:
    """Return the exit code of pytest in the copy; None if it does not end. Drawn cases are the same in each run."""
    paths = os.pathsep.join((str(copy / "src"), str(copy)))
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
    (copy / "words").write_text("\n".join(words))
    command = [sys.executable, "-m", "pytest", "-pno:xdist", "-pno:cacheprovider", "@words"]
    with open(os.devnull, "w") as quiet:
        process = subprocess.Popen(command, cwd=copy, env=env, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        return process.wait(longest_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # and what it started
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
