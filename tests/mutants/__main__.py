"""Draws mutants by room, runs the tests that reach them, prints a table: `python -m mutants --count N --seed S`."""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mutants.examining import OUTCOMES, Examination
from mutants.mutations import MODULE, Mutant, mutants, switched

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "src/phalanx"
ROOMS = sorted(folder.name for folder in HOUSE.iterdir() if list(folder.glob("*.py")))


def main() -> None:
    """Print one line for each mutant, then the table."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", action="append", choices=ROOMS, help="may be repeated")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests, from the root")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and its folder is removed
    rooms = options.room or ROOMS
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as folder:
        copy = Path(folder) / "copy"
        ignored = (".git", ".venv", ".hypothesis", "__pycache__", "runs")  # rooms are called runs too

        def left_out(of: str, names: list[str]) -> list[str]:
            return [n for n in names if n in ignored[: 5 if Path(of) == ROOT else 4] or n.endswith("_cache")]

        shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
        drawn = list(_drawn(rooms, options.count, options.seed, copy))
        shutil.copy(Path(__file__).with_name("switch.py"), copy / f"src/{MODULE}.py")
        (copy / "src/switches").write_bytes(bytes(2 * len(drawn)))
        _enter(copy)
        examination = Examination(drawn, Path(folder))
        plugins = ["no:xdist", "no:cacheprovider", "no:randomly"]
        pytest.main(["-s", *(f"-p{p}" for p in plugins), *options.tests], plugins=[examination])
    found = examination.found.items()
    counts = Counter((Path(m.file).parts[2], outcome) for m, outcome in found)
    lived = [f"{outcome:9} {m}" for m, outcome in found if outcome in ("lived", "cut", "no test")]
    print(table(counts, rooms), *lived, sep="\n")


def _enter(copy: Path) -> None:
    """Let this process, and what it starts, find everything in the copy: drawn cases are the same in each run."""
    os.chdir(copy)
    paths = [str(copy / "src"), str(copy)]
    os.environ.update({"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"})
    sys.dont_write_bytecode = True
    sys.path[:] = [*paths, *(p for p in sys.path if not p.startswith(str(ROOT)) or "site-packages" in p)]


def _drawn(rooms: Sequence[str], count: int, seed: int, copy: Path) -> Iterator[Mutant]:
    """Yield mutants by room, and write them into the copy: of any file and, in it, any kind and place. Long files are
    drawn more often."""
    number = 0
    for i, room in enumerate(rooms):
        rng = random.Random(f"{seed} {room}")
        sources = {p: p.read_text() for p in sorted((HOUSE / room).rglob("*.py"))}
        placed: dict[Path, dict[int, int]] = defaultdict(dict)
        for _ in range(count // len(rooms) + (i < count % len(rooms))):
            while True:
                (path,) = rng.choices(list(sources), [len(s) for s in sources.values()])
                every = list(mutants(str(path.relative_to(ROOT)), ast.parse(sources[path])))
                kind = rng.choice(sorted({m.kind for m in every}) or [""])
                place = rng.choice([k for k, m in enumerate(every) if m.kind == kind] or [-1])
                if place < 0 or place in placed[path].values():
                    continue
                try:
                    text = switched(sources[path], placed[path] | {number: place})
                except SyntaxError:
                    continue
                break
            placed[path][number] = place
            (copy / path.relative_to(ROOT)).write_text(text)
            number += 1
            yield every[place]


def table(counts: Counter[tuple[str, str]], rooms: Sequence[str]) -> str:
    """Return the table by room. What runs at import alone, before its switch is on, and mutants whose tests fail
    without them are not in the score."""
    heads = "".join(f" {head:>7}" for head in ("mutants", *OUTCOMES))
    lines = [f"{'room':14}{heads} {'score':>6}"]
    for room in (*rooms, "all"):
        of = {name: sum(n for (r, o), n in counts.items() if o == name and room in (r, "all")) for name in OUTCOMES}
        total = sum(of.values()) - of["import"] - of["invalid"]
        score = f"{100 * (of['noticed'] + of['endless']) / total:.0f} %" if total else "-"
        counted = "".join(f" {n:7}" for n in (total, *of.values()))
        lines.append(f"{room:14}{counted} {score:>6}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
