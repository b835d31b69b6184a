"""Runs tests in forks of a process that has collected them: to see which reach a mutant, then for each mutant."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import pytest

from mutants.mutations import MODULE, Mutant

OUTCOMES = ("noticed", "endless", "lived", "cut", "no test", "import", "invalid")
"""`cut`: lived until its time was over, before all its tests were run."""
CUT = 4
SECONDS = 40.0
"""Time of a process that the tests of one mutant may take."""
CASES = 2
"""Cases of each parametrised function of other rooms' tests that say what it reaches."""
LONGEST_S = 120.0
"""A run of tests that takes longer has noticed: it does not end."""
MOST_BYTES = 16 * 2**30


@dataclass(eq=False)  # pytest keeps plugins in sets
class Examination:
    """A plugin of pytest that examines mutants in place of running the tests. `found`: what became of each."""

    drawn: Sequence[Mutant]
    folder: Path
    found: dict[Mutant, str] = field(default_factory=dict)
    _failed: bool = False
    _took: float = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test took and whether it failed."""
        self._failed |= report.failed or report.skipped
        self._took += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run tests once to see what they reach, then, for each mutant, those that reach it."""
        from importlib import import_module

        self._switches = import_module(MODULE).switches
        imported = set(self._reached())
        begin = time.monotonic()
        items = {item.nodeid: item for item in _few(session.items, {Path(m.file).parts[2] for m in self.drawn})}
        if self._forked(partial(self._record, list(items.values())), 3600.0) != 0:
            raise pytest.UsageError("the tests were not run to their end: no mutant can be examined")
        records = [json.loads(line) for line in (self.folder / "records").read_text().splitlines()]
        print(f"{len(records)} tests, {time.monotonic() - begin:.0f} s", flush=True)

        @cache
        def holds(test: str) -> bool:
            return self._forked(lambda: self._first_that_fails([items[test]]), LONGEST_S) == 0

        for number, mutant in enumerate(self.drawn):
            begin = time.monotonic()
            tests = _ordered([(name, took, len(reached)) for name, took, reached in records if number in reached])
            # What a fixture or a cache of their files made for one test, the others look at without reaching it.
            files = {t.partition("::")[0] for t in tests}
            quick = sorted((took, name) for name, took, _ in records if name.partition("::")[0] in files)
            tests = list(dict.fromkeys([*tests, *(name for _, name in quick)]))
            (self.folder / "failed").unlink(missing_ok=True)
            self._switches[len(self.drawn) + number] = 1
            code = self._forked(partial(self._first_that_fails, [items[t] for t in tests]), LONGEST_S)
            self._switches[len(self.drawn) + number] = 0
            outcome = {0: "lived", CUT: "cut", None: "endless"}.get(code, "noticed")
            if not tests:
                outcome = "import" if number in imported else "no test"
            elif (self.folder / "failed").exists() and not holds((self.folder / "failed").read_text()):
                outcome = "invalid"
            self.found[mutant] = outcome
            print(f"{outcome:9} {len(tests):3} tests {time.monotonic() - begin:4.0f} s {mutant}", flush=True)
        return True

    def _reached(self) -> Iterator[int]:
        """Yield the mutants that were reached since the last call."""
        for number in range(len(self.drawn)):
            if self._switches[number]:
                self._switches[number] = 0
                yield number

    def _record(self, items: Sequence[pytest.Item]) -> int:
        """Run all items; write a line for each that passes: its name, its seconds and the mutants that it reached."""
        with (self.folder / "records").open("w") as file:
            for item, after in zip(items, [*items[1:], None], strict=True):
                self._failed, self._took = False, 0.0
                list(self._reached())
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if not self._failed:
                    print(json.dumps([item.nodeid, self._took, list(self._reached())]), file=file, flush=True)
        return 0

    def _first_that_fails(self, items: Sequence[pytest.Item]) -> int:
        """Return 1 when an item fails, CUT when their time is over, of this process or of a clock, else 0."""
        begin = time.monotonic()
        for item, after in zip(items, [*items[1:], None], strict=True):
            self._failed = False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._failed:
                (self.folder / "failed").write_text(item.nodeid)
                item.session._setupstate.teardown_exact(None)
                return 1
            if after and (time.process_time() > SECONDS or time.monotonic() - begin > LONGEST_S / 2):
                return CUT
        return 0

    def _forked(self, work: Callable[[], int], longest_s: float) -> int | None:
        """Return the exit code of a forked process that does the work, None if it did not end."""
        child = os.fork()
        if not child:
            _live(work)
        deadline = time.monotonic() + longest_s
        try:
            while time.monotonic() < deadline:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.02)
            return None
        finally:
            with suppress(ProcessLookupError, ChildProcessError):  # the leader of its session, and what it started
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _live(work: Callable[[], int]) -> None:
    os.setsid()
    code = 3
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        code = work()
    finally:
        os._exit(code)


def _few(items: Sequence[pytest.Item], rooms: set[str]) -> Iterator[pytest.Item]:
    """Yield items in their order: all of the rooms' own tests, and not more than CASES of another function."""
    seen: Counter[str] = Counter()
    for item in items:
        seen[item.nodeid.partition("[")[0]] += 1
        if seen[item.nodeid.partition("[")[0]] <= CASES or rooms & {*Path(item.nodeid).parts[1:2]}:
            yield item


def _ordered(reaching: Sequence[tuple[str, float, int]]) -> list[str]:
    """Return tests, one case of each function before others of it, those first that are quick and reach little else.
    `reaching`: (test, seconds, mutants that it reaches)."""
    seen: Counter[str] = Counter()
    turns = {}
    for test, seconds, reached in sorted(reaching, key=lambda t: (t[1] * t[2], t[0])):
        seen[test.partition("[")[0]] += 1
        turns[test] = (seen[test.partition("[")[0]], seconds * reached, test)
    return sorted(turns, key=lambda t: turns[t])
