"""How the process ends that observes a user's script: at once, and without a word of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = [sys.executable, "-m", "phalanx.observation.program.worker"]
TASK = {
    "script": "none.py",
    "module": "",
    "arguments": [],
    "world": 1,
    "ranks": "classes",
    "per_node": 8,
    "axes": {},
    "step": 2,
    "every_micro_batch": False,
    "result": 1,
}


def _importing(folder: Path, parent: int) -> subprocess.Popen[str]:
    """Start the process; its torch is one that is never imported to its end."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(200)\n")
    return subprocess.Popen(
        [*WORKER, json.dumps({**TASK, "parent": parent})],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


_FORKS = """
import os, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
child = os.fork()
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if child:
    os.waitpid(child, 0)
"""


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    process = _importing(tmp_path, os.getpid())
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGINT  # for which the command says that it was interrupted


def test_a_process_whose_parent_died_does_not_start(tmp_path: Path) -> None:
    process = _importing(tmp_path, os.getppid())
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 1


def test_what_a_program_forks_says_nothing(tmp_path: Path) -> None:
    """The copy goes through the rest of the program too, and is no rank."""
    (tmp_path / "program.py").write_text(_FORKS)
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "observe", "--world", "1", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_module_is_the_main_one_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m` has it: what it defines can be pickled."""
    from phalanx.observation.program import processes, worker

    (tmp_path / "trains.py").write_text(
        "import sys\nassert vars(sys.modules['__main__']) is globals()\nprint(*sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(worker, "end_with_parent", lambda parent: None)
    monkeypatch.setattr(worker, "to_json", lambda content: content)
    monkeypatch.setattr(processes, "observe_program", lambda name, program, request: program() or name)
    task = TASK | {"script": "", "module": "trains", "arguments": ["--x"], "parent": 1, "request": {"world": 1}}
    with (tmp_path / "result").open("w") as file:
        monkeypatch.setattr(sys, "argv", ["", json.dumps(task | {"result": os.dup(file.fileno())})])
        worker.main()
    assert json.loads((tmp_path / "result").read_text()) == "-m trains --x"
