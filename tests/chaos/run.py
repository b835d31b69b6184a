"""Runs one case and examines what it leaves behind.

Whatever is done to a run: it ends within its timeout, with a clear error if it fails; no process, file or lock of it
is left; and, resumed, its losses and gradient norms equal to the bit those of a run left alone. Temporary files of a
launcher that is killed in its last moments may stay until its next run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from support.forked_cli import Launcher
from support.quick_runs import at_work, rows
from support.struck_runs import Stroke, begin, files_left, words

from chaos.cases import FAMILIES, PHASES, Case, world
from phalanx.runtime.checkpoint.manifest import MANIFEST
from phalanx.runtime.checkpoint.store import newest_intact

TIMEOUT_S = 8  # of a collective
LIMIT_S = 90.0  # of a run, on a busy machine
_SETTINGS = ("job.global_batch=12", "train.eval_every=4", f"train.timeout_s={TIMEOUT_S}", "train.sample_tokens=0")


class Broken(AssertionError):
    """What must hold after a case does not."""


class Skipped(Exception):
    """The case cannot be run here."""


def _require(condition: object, why: str) -> None:
    if not condition:
        raise Broken(why)


def of_family(family: str, name: str, *more: str) -> list[str]:
    """Return the arguments of a short run."""
    strategy, *settings = FAMILIES[family]
    settings += [f"cluster.ranks={world(family)}", *_SETTINGS]
    pairs = [word for item in settings for word in ("--set", item)]
    return words(name, *pairs, "--strategy", strategy, *more)


class Runs:
    """Runs in a folder (support/struck_runs.folder_of_runs): each case has a name of its own."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self._count = 0
        self._references: dict[str, list[tuple[Any, ...]]] = {}

    def examine(self, case: Case) -> None:
        """Run one case. Raises Broken with what does not hold, Skipped."""
        self._count += 1
        name = f"case-{self._count}"
        try:
            if case.victim == "files":
                self._spoil(case, name)
            else:
                self._strike(case, name)
        finally:
            for run in (self.here / "runs").glob(f"{name}*"):
                shutil.rmtree(run, ignore_errors=True)
            (self.here / "runs" / f".{name}.lock").unlink(missing_ok=True)
            self._clear()

    def begin(self, case: Case, name: str, *more: str, strokes: tuple[Stroke, ...] = ()) -> Launcher:
        """Start a run of the case's family."""
        return begin(self.here, *of_family(case.family, name, *more), strokes=strokes)

    def _run(self, case: Case, name: str, *more: str, strokes: tuple[Stroke, ...] = ()) -> tuple[int, str]:
        """Return (exit code, stderr) of a run, of which nothing may be left."""
        code, _, err = self.begin(case, name, *more, strokes=strokes).finish(LIMIT_S)
        self._require_nothing_left()
        return code, err

    def _require_nothing_left(self) -> None:
        self._require_all_ended()
        _require(not files_left(self.here), f"left: {[path.name for path in files_left(self.here)]}")

    def _require_all_ended(self) -> None:
        deadline = time.monotonic() + 30
        while at_work(self.here):
            _require(time.monotonic() < deadline, f"processes are left: {at_work(self.here)}")
            time.sleep(0.1)

    def _clear(self) -> None:
        """End and remove what a case left that broke, so that the next one does not break for it."""
        for process in at_work(self.here):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for path in files_left(self.here):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)

    def reference(self, family: str) -> list[tuple[Any, ...]]:
        """Return the steps of a family's run left alone."""
        if family not in self._references:
            name = f"alone-{len(self._references)}"
            code, err = self._run(Case(family, 0, ""), name)
            _require(code == 0, f"left alone it ends with {code}: {err}")
            self._references[family] = _steps(self.here / "runs" / name)
        return self._references[family]

    def _strike(self, case: Case, name: str) -> None:
        expected = self.reference(case.family)
        text, nth = PHASES[case.phase]
        victim = case.victim if isinstance(case.victim, int) else -1
        stroke = (case.stroke, victim, text, nth)
        restarts = ("--max-restarts", "1") if case.restarts else ()
        (self.here / "struck").unlink(missing_ok=True)
        process = self.begin(case, name, *restarts, strokes=(stroke,))
        if case.victim == "launcher" and case.stroke == "SIGSTOP":
            self._go_on(process)
        code, _, err = process.finish(LIMIT_S)
        _require((self.here / "struck").exists(), f"it was never struck; exit {code}: {err}")
        self._require_all_ended()
        if case.victim == "launcher" and case.stroke == "SIGKILL" and case.phase == "end" and files_left(self.here):
            # Its ranks may have ended before they could notice. Then its next run removes what is left.
            self._run(case, f"{name}-next")
        self._require_nothing_left()
        _require_outcome(case, code, err)
        self._resume(case, name, expected)

    def _go_on(self, process: Launcher) -> None:
        """Let a launcher that was stopped go on after two seconds."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.here / "struck").exists() and process.running():
            _require(time.monotonic() < deadline, "it was never struck")
            time.sleep(0.05)
        time.sleep(2)
        if process.running():
            process.signal(signal.SIGCONT)

    def _resume(self, case: Case, name: str, expected: list[tuple[Any, ...]]) -> str:
        """Finish a run, and compare its steps with those of a run left alone; return what it says."""
        run = self.here / "runs" / name
        said = ""
        if not (run / "metrics.jsonl").exists() or not _same(_steps(run), expected):
            code, said = self._run(case, name, "--resume")
            if code == 2 and "holds no checkpoint yet" in said:
                code, said = self._run(case, name)
            _require(code == 0, f"resumed it ends with {code}: {said}")
        _require(_same(_steps(run), expected), f"resumed its steps differ: {_steps(run)} instead of {expected}")
        return said

    def _spoil(self, case: Case, name: str) -> None:
        """Do something to the files of a run that was interrupted, and resume it."""
        expected = self.reference(case.family)
        if case.stroke == "two runs in one folder":
            self._twice(case, name, expected)
            return
        code, err = self._run(case, name, strokes=(("SIGTERM", -1, "optimizer", 4),))
        _require(code == 130, f"interrupted it ends with {code}: {err}")
        run = self.here / "runs" / name
        checkpoint = newest_intact(run / "checkpoint")
        assert checkpoint is not None
        what, _, which = case.stroke.partition(" ")
        if case.stroke in ("full disk", "read-only folder"):
            self._mounted(case, name, expected)
        elif case.stroke == "links where the run writes":
            self._linked(case, name, expected)
        elif which in ("plan", "metrics", "tokenizer"):
            file = {"plan": "plan.json", "metrics": "metrics.jsonl", "tokenizer": "tokenizer.json"}[which]
            _SPOIL[what](run / file)
            code, err = self._run(case, name, "--resume")
            _require_said(code, err)
            if code == 0:
                last = {row[0]: row for row in expected}
                _require(all(_same([last[row[0]]], [row]) for row in _steps(run)), "resumed its steps differ")
        else:
            file = {"rank file": "rank-00000.safetensors", "index": "tensors.json", "manifest": MANIFEST}.get(
                which, ""
            )
            _SPOIL[what](checkpoint / file)
            said = self._resume(case, name, expected)
            _require("is damaged" in said or which == "checkpoint", f"the damage is not mentioned: {said}")

    def _twice(self, case: Case, name: str, expected: list[tuple[Any, ...]]) -> None:
        first = self.begin(case, name, strokes=(("slow", 0, "optimizer", 2),))
        run, deadline = self.here / "runs" / name, time.monotonic() + LIMIT_S
        while not (run / "metrics.jsonl").exists():
            _require(time.monotonic() < deadline, "it never began")
            time.sleep(0.02)
        # Launchers of one folder write to one file; the second has a folder beside it, linked.
        beside = self.here.with_name(f"{self.here.name}-beside")
        beside.mkdir(exist_ok=True)
        for item in ("job.toml", "text.txt", "runs", "tmp"):
            if not (beside / item).is_symlink():
                (beside / item).symlink_to(self.here / item)
        code, _, err = begin(beside, *of_family(case.family, name)).finish(LIMIT_S)
        _require(code == 2 and "is in use by another process" in err, f"the second ends with {code}: {err}")
        code, _, err = first.finish(LIMIT_S)
        _require(code == 0, f"the first ends with {code}: {err}")
        self._require_nothing_left()
        _require(_same(_steps(run), expected), "its steps differ")

    def _linked(self, case: Case, name: str, expected: list[tuple[Any, ...]]) -> None:
        """Put links to files outside wherever the resumed run writes: none of those files may change."""
        run, outside = self.here / "runs" / name, self.here / "outside"
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        for file in (
            "metrics.jsonl",
            ".metrics.jsonl",
            "plan.json",
            "recorded.json",
            "trace.json",
            "tokenizer.json",
            "report.html",
        ):
            content = (run / file).read_text() if (run / file).exists() else "{}"
            (outside / file).write_text(content)
            (run / file).unlink(missing_ok=True)
            (run / file).symlink_to(outside / file)
        (outside / "lock").write_text("kept")
        lock = run.with_name(f".{name}.lock")
        before = {file.name: file.read_text() for file in outside.iterdir()}
        self._resume(case, name, expected)
        _require(before == {file.name: file.read_text() for file in outside.iterdir()}, "a file outside has changed")
        lock.unlink()
        lock.symlink_to(outside / "lock")
        code, err = self._run(case, name)
        _require(code == 2, f"with a link for its lock it ends with {code}: {err}")
        _require_said(code, err)
        _require((outside / "lock").read_text() == "kept", "a file outside has changed")

    def _mounted(self, case: Case, name: str, expected: list[tuple[Any, ...]]) -> None:
        """Resume on a file system that is full, or read-only; then on one that is neither."""
        run = self.here / "runs" / name
        kept = run.with_name(f"{name}.kept")
        run.rename(kept)
        run.mkdir()
        used = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file())
        with ExitStack() as stack:
            _mount("-t", "tmpfs", "-o", f"size={2 * used + 2**20}", "tmpfs", str(run))
            stack.callback(_call, "umount", "-l", str(run))
            shutil.copytree(kept, run, dirs_exist_ok=True)
            if case.stroke == "full disk":
                free = shutil.disk_usage(run).free
                (run / "ballast").write_bytes(bytes(max(0, free - 50_000)))
            else:
                _mount("-o", "remount,ro", str(run))
            code, err = self._run(case, name, "--resume")
            _require(code in (1, 2), f"it ends with {code}: {err}")
            _require_said(code, err)
            word = "disk is full|No space left" if case.stroke == "full disk" else "Read-only file system"
            _require(re.search(word, err.splitlines()[-1]), f"the reason is not given: {err}")
            if case.stroke == "full disk":
                (run / "ballast").unlink()
            else:
                _mount("-o", "remount,rw", str(run))
            self._resume(case, name, expected)
        run.rmdir()


def _require_outcome(case: Case, code: int, err: str) -> None:
    """Require the exit code and the message that a stroke must lead to."""
    if case.victim == "launcher":
        # A launcher that is asked to stop in the last moments of a run has nothing left to stop.
        codes = {"SIGKILL": (-signal.SIGKILL,), "SIGSTOP": (0,)}.get(case.stroke, (0, 130))
    elif case.stroke in ("slow", "clock") or case.restarts:
        codes = (0,)
    else:
        codes = (0, 130) if case.stroke == "SIGTERM" else (1,)
    _require(code in codes, f"it ends with {code}, not {codes}: {err}")
    if code == 1:
        last = err.strip().splitlines()[-1]
        _require(last.startswith(f"error: rank {case.victim} "), f"rank {case.victim} is not named: {last}")
    _require("Traceback" not in err or case.stroke == "SIGKILL", err)


def _require_said(code: int, err: str) -> None:
    """Require success, or an error of one line at the end."""
    if code:
        _require(code in (1, 2) and err.strip().splitlines()[-1].startswith("error: "), f"it ends with {code}: {err}")
        _require("Traceback" not in err, err)


def _steps(run: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"], row.get("eval_loss")) for row in rows(run)]


def _same(steps: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> bool:
    """Whether two runs took the same steps, to the bit. The step after which a run is stopped is not evaluated."""
    return [row[:3] for row in steps] == [row[:3] for row in expected] and all(
        mine[3] in (None, other[3]) for mine, other in zip(steps, expected, strict=True)
    )


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


_SPOIL: dict[str, Callable[[Path], None]] = {"flipped": _flip, "truncated": _truncate, "missing": _remove}


def _mount(*words: str) -> None:
    if _call("mount", *words):
        raise Skipped("file systems cannot be mounted here")


def _call(*words: str) -> int:
    return subprocess.run(words, check=False, capture_output=True).returncode
