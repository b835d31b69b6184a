"""Ctrl-C ends any command within a second, with one line, exit code 130 and nothing left; a training finishes its
step and saves (tests/runtime/test_failures.py has its second Ctrl-C, tests/cli/test_commands.py that of parity).

Held to is the CPU time that a command takes after the signal: on a busy machine the clock says little.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.forked_cli import Launcher
from support.quick_runs import at_work
from support.struck_runs import folder_of_runs

JOBS = "submit,gpus,duration\n" + "".join(f"{i},{1 + i % 64},{100 + 7 * (i % 900)}\n" for i in range(60_000))
LONG = {
    "plan": "plan --model deepseek-v3 --cluster dgx-h100 --gpus 2048 --batch 15360 --seq 4096",
    "serve plan": "serve plan --model llama3-70b --cluster dgx-h100 --gpus 64 --input 4000 --output 500 --ttft 1s",
    "validate": "validate choices",
    "cluster simulate": "cluster simulate --trace jobs.csv --cluster 64x8 --policy conservative",
    "measure": "measure --ranks 2",
    "learn cases": "learn cases",
    "observe": "observe --world 2 -- program.py",
}
_QUICK = ("plan", "serve plan", "validate", "cluster simulate", "measure")
_AT_WORK_S = 0.3  # CPU time by which a command is past its first imports


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = folder_of_runs(tmp_path_factory.mktemp("interrupted"))
    (here / "jobs.csv").write_text(JOBS)
    (here / "program.py").write_text("while True:\n    pass\n")
    return here


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in _QUICK else pytest.mark.long) for n in LONG])
def test_ctrl_c_ends_a_command_within_a_second(here: Path, name: str) -> None:
    words = LONG[name].split()
    process = Launcher(here, *words, environment={"TMPDIR": str(here / "tmp"), "PHALANX_CACHE": str(here / "cache")})
    of_others = name in ("measure", "observe")  # processes of their own do the work
    deadline = time.monotonic() + 60
    while len(at_work(here)) < 2 if of_others else cpu_s(process.pid) < _AT_WORK_S:
        assert process.running(), f"too short to be interrupted: {process.said()}"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    before, began = cpu_s(process.pid), time.monotonic()
    process.signal(signal.SIGINT)
    after = before
    while process.running():
        after = max(after, cpu_s(process.pid))
        assert time.monotonic() - began < 30, f"{name} goes on: {process.said()}"
        time.sleep(0.01)
    code, _, err = process.finish()
    assert (code, err.strip().splitlines()[-1:]) == (130, ["interrupted"]), err
    assert "Traceback" not in err
    assert after - before < 1.0
    while at_work(here):
        assert time.monotonic() - began < 30
        time.sleep(0.05)


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that a process has taken; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
