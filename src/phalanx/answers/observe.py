"""`phalanx observe`: run a user's program in a process of its own and read the observation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.answers.encode import plain
from phalanx.observation.request import ObservationRequest
from phalanx.schedule.observation import Observation
from phalanx.schedule.observation_file import from_json, to_json
from phalanx.spec.errors import InputError

_PYTHONS = ("python", "python3")
plain.register(Observation, to_json)


@dataclass(frozen=True)
class ProgramCommand:
    """A user's program: the Python that runs it, its script or module, and its arguments."""

    python: str
    script: str
    module: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.script or self.module


def program(words: Sequence[str]) -> ProgramCommand:
    """Read a command line such as `python train.py ARGS`, `python -m module ARGS` or `train.py ARGS`.

    `python` and `python3` mean the Python that runs Phalanx; another is named by its path. Raises InputError.
    """
    if not words:
        raise InputError("program", None, "is missing", "phalanx observe --world 64 -- python train.py")
    python, rest = sys.executable, list(words)
    name = Path(rest[0]).name
    if name in ("torchrun", "accelerate", "deepspeed", "mpirun", "srun"):
        raise InputError(
            "program", rest[0], "starts many processes", "name the program itself: -- python train.py ARGS"
        )
    if name.startswith("python"):
        if rest[0] not in _PYTHONS:
            python = shutil.which(rest[0]) or ""
            if not python:
                raise InputError("program", rest[0], "is not a program on this machine")
        rest = rest[1:]
    while rest and rest[0] in ("-u", "-O", "-B"):
        rest = rest[1:]
    if not rest:
        raise InputError("program", words[0], "names no script", "phalanx observe --world 64 -- python train.py")
    if rest[0] == "-m":
        if len(rest) == 1:
            raise InputError("program", "-m", "names no module")
        return ProgramCommand(python, "", rest[1], tuple(rest[2:]))
    if rest[0].startswith("-"):
        raise InputError(
            "program", rest[0], "is an option of Python that is not supported", "name a script or -m MODULE"
        )
    if not Path(rest[0]).is_file():
        raise InputError("program", rest[0], "is not a file")
    return ProgramCommand(python, rest[0], "", tuple(rest[1:]))


def request(
    world: int, ranks: str, mesh: str | None, per_node: int, step: int, every_micro_batch: bool
) -> ObservationRequest:
    """Read a request: `ranks` is `classes`, `all` or a list such as "0,8"; `mesh` is a list of named axes such as
    "pp=8,dp=8,tp=8", outermost first. Raises InputError."""
    axes: dict[str, int] = {}
    for part in mesh.split(",") if mesh else ():
        name, equals, size = part.partition("=")
        if not equals or not re.fullmatch("[0-9]{1,9}", size) or not name:
            raise InputError("mesh", mesh, "is not a list of axes", "write it as pp=8,dp=8,tp=8, outermost first")
        axes[name.strip()] = int(size)
    everything = ObservationRequest(world, per_node, axes, None, step, every_micro_batch)
    if ranks == "classes":
        return everything
    try:
        numbers = range(world) if ranks == "all" else dict.fromkeys(int(part) for part in ranks.split(","))
    except ValueError:
        raise InputError("ranks", ranks, "is neither `classes`, `all` nor a list of ranks such as 0,8") from None
    return replace(everything, ranks=tuple(numbers))


def observe(target: ProgramCommand, question: ObservationRequest) -> Observation:
    """Observe a program; its output goes to stderr. Raises InputError if it cannot be observed."""
    reads, writes = os.pipe()
    task = {
        "script": target.script,
        "module": target.module,
        "arguments": target.arguments,
        "request": asdict(question),
        "parent": os.getpid(),
        "result": writes,
    }
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), _needed(target.python, source)) if p)
    command = [target.python, "-m", "phalanx.observation.program.worker", json.dumps(task)]
    child = subprocess.Popen(
        command, pass_fds=[writes], stdout=sys.stderr.fileno(), env={**os.environ, "PYTHONPATH": path}
    )
    os.close(writes)
    try:
        with os.fdopen(reads) as file:
            text = file.read()
        code = child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if not text:
        if code == -2 or code == 130:
            raise KeyboardInterrupt
        raise InputError(target.name, None, f"the process that observed it ended with code {code}")
    content: dict[str, Any] = json.loads(text)
    if "error" in content:
        raise InputError(target.name, None, content["error"])
    return from_json(text)


def _needed(python: str, source: str) -> str:
    """Return the folder of Phalanx's sources if another Python than this one is to import it, else nothing."""
    return "" if python == sys.executable else source
