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

OUTCOMES = ("noticed", "endless", "lived", "no test", "import", "invalid")
SECONDS = 20.0
"""Time of the tests that one mutant may take, as it was without it."""
CASES = 2
"""So many cases of each parametrised function say what it reaches."""
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
    _imported: set[int] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test took and whether it failed."""
        self._failed |= report.failed or report.skipped
        self._took += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Examine all mutants."""
        from importlib import import_module

        self._switches = import_module(MODULE).switches
        self._imported = set(self._reached())
        few = {item.nodeid: item for item in _few(session.items)}
        rest = [item for item in session.items if item.nodeid not in few]
        self._examine(range(len(self.drawn)), list(few.values()), rest)
        # Of what lived so far, the only case that reaches it may be among the rest: that of its own room is tried.
        lived = [n for n, mutant in enumerate(self.drawn) if self.found[mutant] in ("lived", "no test")]
        rooms = {Path(self.drawn[number].file).parts[2] for number in lived}
        self._examine(lived, [item for item in rest if rooms & {*Path(item.nodeid).parts[1:2]}], ())
        return True

    def _examine(self, numbers: Sequence[int], items: Sequence[pytest.Item], further: Sequence[pytest.Item]) -> None:
        """Run the items once to see what they reach, then those that reach each of the mutants. `further`: cases of
        the same functions, run after them."""
        begin = time.monotonic()
        if self._forked(partial(self._record, items), 3600.0) != 0:
            raise pytest.UsageError("the tests were not run to their end: no mutant can be examined")
        records = [json.loads(line) for line in (self.folder / "records").read_text().splitlines()]
        print(f"{len(records)} tests, {time.monotonic() - begin:.0f} s", flush=True)
        named = {item.nodeid: item for item in (*items, *further)}
        others: dict[str, list[str]] = {}
        for item in further:
            others.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)

        @cache
        def holds(test: str) -> bool:
            return self._forked(lambda: self._first_that_fails([named[test]]), LONGEST_S) == 0

        for number in numbers:
            mutant = self.drawn[number]
            begin = time.monotonic()
            tests = _chosen([(name, took, len(reached)) for name, took, reached in records if number in reached])
            tests += [name for function in {t.partition("[")[0] for t in tests} for name in others.get(function, ())]
            # What a fixture or a cache of their files made for one test, the others look at without reaching it.
            files = {t.partition("::")[0] for t in tests}
            quick = sorted((took, name) for name, took, _ in records if name.partition("::")[0] in files)
            tests = list(dict.fromkeys([*tests, *(name for _, name in quick)]))
            if not tests:
                self.found.setdefault(mutant, "import" if number in self._imported else "no test")
                continue
            (self.folder / "failed").unlink(missing_ok=True)
            self._switches[len(self.drawn) + number] = 1
            code = self._forked(partial(self._first_that_fails, [named[t] for t in tests]), LONGEST_S)
            self._switches[len(self.drawn) + number] = 0
            outcome = {0: "lived", None: "endless"}.get(code, "noticed")
            if outcome == "noticed" and (self.folder / "failed").exists():
                by = (self.folder / "failed").read_text()
                outcome = "noticed" if holds(by) else "invalid"
            self.found[mutant] = outcome
            print(f"{outcome:9} {len(tests):3} tests {time.monotonic() - begin:4.0f} s {mutant}", flush=True)

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
        """Run items until one fails, or their time is over, of this process or of a clock; return whether one did."""
        begin = time.monotonic()
        for item, after in zip(items, [*items[1:], None], strict=True):
            self._failed = False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._failed:
                (self.folder / "failed").write_text(item.nodeid)
                item.session._setupstate.teardown_exact(None)
                return 1
            if time.process_time() > 2 * SECONDS or time.monotonic() - begin > LONGEST_S / 2:
                break
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


def _few(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield items in their order, not more than CASES of a function."""
    seen: Counter[str] = Counter()
    for item in items:
        seen[item.nodeid.partition("[")[0]] += 1
        if seen[item.nodeid.partition("[")[0]] <= CASES:
            yield item


def _chosen(reaching: Sequence[tuple[str, float, int]]) -> list[str]:
    """Return the tests to run: one case of each function before others of it, those first that are quick and reach
    little else. `reaching`: (test, seconds, mutants that it reaches)."""
    seen: Counter[str] = Counter()
    turns = {}
    for test, seconds, reached in sorted(reaching, key=lambda t: (t[1] * t[2], t[0])):
        seen[test.partition("[")[0]] += 1
        turns[test] = (seen[test.partition("[")[0]], seconds * reached, seconds)
    chosen, left = [], SECONDS
    for test in sorted(turns, key=lambda t: (turns[t], t)):
        if turns[test][2] <= left or not chosen:
            chosen.append(test)
            left -= turns[test][2]
    return chosen
