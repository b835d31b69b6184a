"""Which tests run a line: a map for each room, made once by its own tests under coverage, and stored."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from coverage import CoverageData

SECONDS = 30.0
"""Time of the tests, as it was when the map was made, that one mutant may take."""


@dataclass(frozen=True)
class Covering:
    """The tests in tests/ROOM. Ranks and forked runs are not traced: lines that only they run have no test here."""

    room: str
    data: Path

    @cached_property
    def _coverage(self) -> CoverageData:
        data = CoverageData(str(self.data))
        data.read()
        return data

    @cached_property
    def _seconds(self) -> dict[str, float]:
        """Each test's time, by `file::name`."""
        cases = xml.parse(self.data.with_suffix(".xml")).iter("testcase")
        return {f"{c.get('classname')}::{c.get('name')}": float(c.get("time", 0)) for c in cases}

    def tests(self, path: Path, line: int) -> list[str]:
        """Return the tests that run a line, quick ones first, one case of each function before others of it."""
        contexts = self._coverage.contexts_by_lineno(str(path)).get(line, ())
        took = {t: self._took(t) for t in {c.removesuffix("|run") for c in contexts} if "::" in t}
        seen: dict[str, int] = {}
        turns = {}
        for test in sorted(took, key=lambda t: (took[t], t)):
            function = test.partition("[")[0]
            turns[test] = seen[function] = seen.get(function, 0) + 1
        chosen, left = [], SECONDS
        for test in sorted(took, key=lambda t: (turns[t], took[t], t)):
            if took[test] <= left or not chosen:
                chosen.append(test)
                left -= took[test]
        return chosen

    def _took(self, test: str) -> float:
        file, _, name = test.partition("::")
        return self._seconds.get(f"{file.removesuffix('.py').replace('/', '.')}::{name}", 1.0)


def covering(room: str, root: Path, store: Path) -> Covering:
    """Return the map of a room, made now where the files have changed since it was."""
    folders = [f for f in (root / "src/phalanx" / room, root / "tests" / room) if f.exists()]
    files = sorted(p for f in folders for p in f.rglob("*.py"))
    seal = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()[:12]
    data = store / f"{room}-{seal}.coverage"
    if not data.with_suffix(".xml").exists() and len(folders) == 2:
        store.mkdir(exist_ok=True)
        print(f"which tests run which lines of {room} ...", file=sys.stderr, flush=True)
        options = ["--cov", "--cov-context=test", "--cov-report=", f"--junitxml={data.with_suffix('.xml')}"]
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *options, f"tests/{room}"]
        subprocess.run(command, cwd=root, env=environment(root) | {"COVERAGE_FILE": str(data)}, check=True)
    return Covering(room, data)


def environment(root: Path) -> dict[str, str]:
    """Return the variables of a run of tests in a copy of the repository: drawn cases are the same in each."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "CI": "true"}


def nearest(path: Path, root: Path) -> Sequence[str]:
    """Return the test files that import a module, or speak of it most: for lines that no test of the room was seen to
    run, because ranks do, or tests of other rooms."""
    module = ".".join(path.relative_to(root / "src").with_suffix("").parts).removesuffix(".__init__")
    found = []
    for file in sorted((root / "tests").rglob("test_*.py")):
        text = file.read_text()
        count = 5 * text.count(module) + len(re.findall(rf"\b{module.rpartition('.')[2]}\b", text))
        found += [(-count, str(file.relative_to(root)))] if count else []
    return [file for _, file in sorted(found)[:2]]
