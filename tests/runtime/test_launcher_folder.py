"""The temporary folder of a launcher: what killed ones leave behind is removed by the next, and nothing else is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from phalanx.runtime.process import folder
from phalanx.runtime.process.folder import private_folder
from phalanx.runtime.process.launch import launch

# Launchers whose rank (`python -m timeit STATEMENT` runs a statement) kills them, and ends before it could notice; or
# goes on.
KILLED = "import os; os.kill(os.getppid(), 9); os._exit(0)"
OUTLIVED = "import os, time; print(os.getpid(), flush=True); os.kill(os.getppid(), 9); time.sleep(60)"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def killed(statement: str) -> str:
    """Launch a rank that kills its launcher; return the first line that it prints."""
    program = f"from phalanx.runtime.process.launch import launch; launch('timeit', {statement!r}, 1, 1)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    return line


def test_the_next_launcher_removes_what_a_killed_one_left(temporary: Path) -> None:
    killed(KILLED)
    (left,) = temporary.iterdir()
    assert (left / "attempt-0").is_dir()
    launch("timeit", "import os; os._exit(0)", 1, 1)
    assert not list(temporary.iterdir())


def test_a_folder_whose_ranks_go_on_is_kept(temporary: Path) -> None:
    rank = int(killed(OUTLIVED))
    (left,) = temporary.iterdir()
    with private_folder() as (mine, _):
        assert sorted(temporary.iterdir()) == sorted([left, mine])
        folder.remove_abandoned()  # as a launcher does that begins beside this one
        assert mine.is_dir()
    os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while left.exists():  # until the kernel has released the lock
        assert time.monotonic() < deadline
        folder.remove_abandoned()


@pytest.mark.parametrize("whose", ["nobody's", "a beginner's", "another host's", "another user's", "linked"])
def test_what_is_not_a_killed_launchers_is_kept(whose: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_folder() as (mine, _):
        left = shutil.copytree(mine, temporary / "phalanx-left")  # with the lock file, which nobody has locked
    if whose == "nobody's":  # somebody calls a folder of his own so
        (left / "launcher.lock").unlink()
    elif whose == "a beginner's":
        (left / "launcher.lock").write_bytes(b"")
    elif whose == "another host's":
        (left / "launcher.lock").write_bytes(b"far away\n")
    elif whose == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        left = left.rename(temporary / "target")
        (temporary / "phalanx-link").symlink_to(left)
    folder.remove_abandoned()
    assert left.is_dir()
