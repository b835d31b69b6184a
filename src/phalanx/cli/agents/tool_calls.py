"""Commands as tools for agents: the JSON schema of a command's options, and its calls in processes of their own.

A tool is a command that computes and prints JSON. Its schema is made from the command's options, so that the two
cannot disagree. A call runs in a process that is forked from a warm one, opens no file outside of a folder, writes
none, and ends when it is cancelled or takes too long.
"""

import json
import multiprocessing
import os
import resource
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TextIO, get_args, get_origin

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class Tool:
    """A command that agents may call."""

    name: str
    words: tuple[str, ...]
    """The command, with its form."""
    about: str
    """Description for agents: when to call it."""


TOOLS = Rows(Path(__file__).with_name("tools.toml"), record(Tool, "name"))
_HIDDEN = ("json", "save", "out", "more", "help", "assertions", "strict")
"""Options that tools lack: they only change the printed form, or write files."""
_TYPES = {int: "integer", float: "number", bool: "boolean"}
_PRELOADED = [
    "phalanx.cli.app",
    "phalanx.cli.strategies",
    "phalanx.cli.agents.answered",
    "phalanx.answers.explanation",
    "typer._adapters",
]
"""Modules that the first answer needs; a search imports more, for which the first answer would have to wait."""
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"})
"""Audit events that a call may never cause."""
MEMORY_BYTES = 8 * 2**30
"""Address space of a call."""


@cache
def _command(tool: Tool) -> Any:
    from typer.main import get_command

    from phalanx.cli.app import app

    entry: Any = get_command(app)
    for word in tool.words:
        entry = entry.commands[word]
    return entry


def _options(tool: Tool) -> dict[str, Any]:
    return {p.name: p for p in _command(tool).params if p.name not in _HIDDEN}


def schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    options = _options(tool)
    required = [name for name, option in options.items() if option.required]
    properties = {name: _property(option) for name, option in options.items()}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _property(option: Any) -> dict[str, Any]:
    annotation = option.type_descriptor.annotation
    several = get_origin(annotation) in (list, tuple)
    single = get_args(annotation)[0] if several else annotation
    kind: dict[str, Any] = {"type": _TYPES.get(single, "string")}
    if get_origin(single) is Literal:
        kind["enum"] = list(get_args(single))
    described = {"description": " ".join(option.help.split())} if getattr(option, "help", None) else {}
    return ({"type": "array", "items": kind} if several else kind) | described


_A_MINUTE = {"requests": 75_000, "trials": 100_000}
"""Argument that makes a call long -> the value that takes about a minute; searches take seconds at any size."""


def words_of(tool: Tool, arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line of a call. Raises InputError for an argument that the tool does not have, and for a
    call that would run for minutes."""
    options, words = _options(tool), list(tool.words)
    places: list[str] = []
    for name, value in arguments.items():
        if name not in options:
            raise InputError(name, value, f"is no argument of {tool.name}", nearest(name, options))
        option = options[name]
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int | float) for each in values):
            raise InputError(name, value, "is no text or number", f"see the schema of {tool.name}")
        if (most := _A_MINUTE.get(name)) and any(str(each).isdecimal() and int(each) > most for each in values):
            remedy = f"ask for at most {most:,}, or run it as a command"
            raise InputError(name, value, "would run for minutes", remedy)
        if option.param_type_name == "argument":
            places += map(str, values)
        elif getattr(option, "is_flag", False):
            words += [option.opts[0]] if value is True else []
        else:
            words += [f"{option.opts[0]}={each}" for each in values]
    return [*words, "--json", *(["--", *places] if places else [])]


@dataclass(frozen=True)
class Reply:
    """The reply to a call: plain data, or the line that says why there is none. `notes`: its lines of progress."""

    data: Any
    error: str
    notes: tuple[str, ...]


class ToolCall:
    """A running call, in a process of its own."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._scratch = tempfile.TemporaryDirectory(prefix="phalanx-call-")
        self.pipe, theirs = context.Pipe(duplex=False)
        arguments = (list(words), str(folder), self._scratch.name, theirs)
        self._process: BaseProcess = context.Process(target=_answer, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process, whether it has answered or not."""
        self._process.kill()
        self._process.join()
        self._scratch.cleanup()


def warm() -> None:
    """Start the process that calls are forked from, with its modules imported."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join()


class _Lines(StringIO):
    """Sends announced lines to the parent, except lines about files in the scratch folder."""

    def __init__(self, to: Connection, scratch: str) -> None:
        super().__init__()
        self._to, self._scratch = to, scratch

    def write(self, text: str) -> int:
        for line in filter(None, map(str.strip, text.splitlines())):
            if self._scratch not in line:
                self._to.send(("note", line))
        return len(text)


def _answer(words: list[str], folder: str, scratch: str, to: Connection) -> None:
    """Run a command line in a folder and send its output to the parent; the body of a call's process."""
    from phalanx.cli.app import app

    os.setsid()
    os.chdir(folder)
    if "plan" in words[:2]:  # whoever asks gets the answer, not the file
        words.insert(2, f"--out={scratch}/plan.json")
    sys.stdin = open(os.devnull)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _fence(Path(folder), Path(scratch))
    out: TextIO = StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(_Lines(to, scratch)):
        try:
            app(words)
        except SystemExit as end:
            code = end.code
        except MemoryError:
            to.send(("note", "error: the question takes more memory than a call may have; ask a smaller one"))
            code = 2
    to.send(("answer", (code, out.getvalue())))  # type: ignore[attr-defined]


def _fence(folder: Path, scratch: Path) -> None:
    """Let this process open files only in a folder and the installation, and write files only in `scratch`."""
    ours = Path(__file__).parents[2]
    python = (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    allowed = (scratch, folder, ours, *python, "/proc/self")
    roots = tuple(f"{os.path.realpath(str(path))}{os.sep}" for path in allowed)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    own = f"{os.path.realpath(scratch)}{os.sep}"

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            raise PermissionError(13, "a tool starts no program and connects to nothing", event)
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        name, _, flags = arguments
        path = os.path.realpath(os.fsdecode(name))
        if path == os.devnull:
            return
        if flags & writing and not path.startswith(own):
            raise PermissionError(13, "a tool writes no file", os.fsdecode(name))
        if not path.startswith(roots):
            raise PermissionError(13, "is outside of the folder that tools may read", os.fsdecode(name))

    sys.addaudithook(watch)


def reply(code: Any, printed: str, notes: Sequence[str]) -> Reply:
    """Return the reply of a finished call. Printed JSON is an answer even with exit code 1, as of a lint with
    findings."""
    errors = [line for line in notes if line.startswith("error:")]
    others = tuple(line for line in notes if not line.startswith("error:"))
    try:
        data = json.loads(printed)
    except ValueError:
        return Reply(None, errors[-1] if errors else f"error: there is no answer (exit code {code})", others)
    return Reply(data, "", others)
