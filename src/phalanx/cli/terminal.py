"""What all commands share: exit codes, errors as one line, the console, JSON.

Exit codes: 0 done; 1 a check or a rank failed; 2 the input was wrong; 130 interrupted, state saved.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.spec.errors import InputError

_SILENT_S = 10.0  # after so long without output, a line says that the command still runs
DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
_INPUT_ERRORS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EROFS, errno.ENXIO, errno.EINVAL),
}
"""Numbers of system errors that are about a file's name, rather than about the machine's state."""


def os_error_words(error: OSError) -> str:
    """Write a system error as `file = name: reason`, without its number."""
    from phalanx.spec.errors import InputError

    reason = (error.strerror or str(error) or type(error).__name__).lower()
    return reason if error.filename is None else str(InputError("file", str(error.filename), reason))


class _LastLine:
    """The last line that was announced, and its time by time.monotonic."""

    text = ""
    at = 0.0


@contextmanager
def _signs_of_life() -> Iterator[None]:
    """Print the last announced line with its age to stderr, whenever nothing was announced for `_SILENT_S`."""
    ended = threading.Event()
    _LastLine.text, _LastLine.at = "", time.monotonic()

    def watch() -> None:
        while not ended.wait(_SILENT_S / 10):
            text, since = _LastLine.text, time.monotonic() - _LastLine.at
            if since >= _SILENT_S * (1 + spoken.get(text, 0)):
                spoken[text] = spoken.get(text, 0) + 1
                what = text.removesuffix(" ...") or "working"
                print(printable(f"{what}: {since:.0f} s so far ..."), file=sys.stderr, flush=True)

    spoken: dict[str, int] = {}
    thread = threading.Thread(target=watch, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def exit_on_error(speaks: bool = False) -> Iterator[None]:
    """Turn an expected error into one line on stderr and an exit code; any other error keeps its traceback.

    A line every ten seconds says that the command still runs, unless it prints its own progress (`speaks`)."""
    from phalanx.spec.errors import InputError, Unproved

    try:
        with nullcontext() if speaks or os.environ.get("RANK", "0") != "0" else _signs_of_life():
            yield
    except InputError as error:
        announce(f"error: {as_typed(error)}")
        raise typer.Exit(WRONG_INPUT) from None
    except KeyboardInterrupt:
        announce("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Unproved as error:
        announce(f"error: {error}")
        raise typer.Exit(FAILED) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        announce(f"error: {os_error_words(error)}")
        raise typer.Exit(WRONG_INPUT if error.errno in _INPUT_ERRORS else FAILED) from None
    except OverflowError as error:
        announce(f"error: numbers: are too large to compute with ({error}); give some of a usual size")
        raise typer.Exit(WRONG_INPUT) from None
    except RuntimeError as error:
        # By name, because importing them would import torch. Any other RuntimeError is a bug and shows its trace.
        if type(error).__name__ not in ("RankFailure", "CheckpointError", "ReplicasDiffer", "LabError"):
            raise
        announce(f"error: {error}")
        raise typer.Exit(WRONG_INPUT if getattr(error, "wrong_input", False) else FAILED) from None


def context() -> Any:
    """Return the context of the command that runs; None outside of one."""
    return import_module(f"{typer.BadParameter.__module__.rpartition('.')[0]}.globals").get_current_context(True)


def is_stated(line: Any, name: str) -> bool:
    """Whether a command line states a parameter."""
    source = line.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def as_typed(error: InputError) -> InputError:
    """Return an error with its field as the running command spells it: `micro_batch` becomes `--micro-batch`, if that
    option was given, or the error has no value."""
    from phalanx.spec.errors import InputError

    line = context()
    spelling = {}
    for parameter in [] if line is None else line.command.params:
        if error.value is None or is_stated(line, parameter.name):
            for option in parameter.opts:
                if option.startswith("--"):
                    spelling[option.lstrip("-").replace("-", "_")] = option
    named = [_FIELD.sub(lambda m: spelling.get(m[0], m[0]), part) for part in error.field.split(", ")]
    return InputError(", ".join(named), error.value, error.reason, error.remedy)


_FIELD = re.compile(r"^[a-z_]+(?= |$)")


def require_torch() -> None:
    """Require the packages that training needs. Raises InputError where only planning is installed."""
    import importlib.util

    from phalanx.spec.errors import InputError

    for name in ("torch", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            raise InputError("installation", None, f"{name} is not installed", "pip install '.[train]' in a checkout")


def require_writable(option: str, file: Path | None) -> None:
    """Require that `option`'s file can be written, before anything starts. Raises InputError."""
    from phalanx.spec.errors import InputError

    if file is None:
        return
    if file.is_dir():
        raise InputError(option, str(file), "is a folder", "name a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        remedy = "" if file.parent.is_dir() else "make its folder first"
        raise InputError(option, str(file), "cannot be written", remedy)


def console() -> Console:
    """Return a console as wide as COLUMNS, else the terminal, else 120 columns. It prints tables without breaking
    words, and reads no markup in names from files."""
    from rich.console import Console, ConsoleOptions, RenderHook
    from rich.segment import Segment
    from rich.table import Table

    from phalanx.report.style import print_fitted

    class Printable(RenderHook):
        """Escapes control characters in rendered text, before it is styled."""

        def __init__(self, *shown: Any) -> None:
            self._shown = shown

        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [Printable(*renderables)]

        def __rich_console__(self, screen: Console, options: ConsoleOptions) -> Iterator[Segment]:
            for one in self._shown:
                for text, style, control in screen.render(one, options):
                    yield Segment(printable(text), style, control)

    class Piped(Console):
        """A console whose reader may leave."""

        def on_broken_pipe(self) -> None:
            """Leave the end of the command to its caller; rich would exit with code 1."""
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    class Screen(Piped):
        """A console that fits tables."""

        def print(self, *objects: Any, **options: Any) -> None:
            """Print as a console does; a table alone is fitted."""
            if len(objects) == 1 and isinstance(objects[0], Table) and not options:
                plain = Piped(width=self.width, file=self.file, markup=False, emoji=False)
                plain.push_render_hook(Printable())
                print_fitted(plain, objects[0])
            else:
                super().print(*objects, **options)

    own = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()  # rich reads it
    # rich's colours are control characters: its text is escaped before it is styled, and then bypasses `Screened`.
    file = sys.stdout.stream if isinstance(sys.stdout, Screened) else None
    screen = Screen(width=None if own else 120, markup=False, emoji=False, file=file)
    screen.push_render_hook(Printable())
    return screen


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text with control characters escaped, except ends of lines and tabs, so that a terminal shows a file's
    text and does not obey it."""
    return _CONTROL.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


class Screened:
    """A stream that escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text with its control characters escaped."""
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def prepare_streams() -> None:
    """Open the null device in place of a missing stdin, stdout or stderr, as under cron: otherwise other files would
    get their numbers. Characters that a stream's encoding lacks become question marks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(null, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    if "--help" not in sys.argv:  # help has colours, and no text from files
        sys.stdout = Screened(sys.stdout)


def announce(text: str) -> None:
    """Print a line of progress, a note or an error to stderr."""
    _LastLine.text, _LastLine.at = text, time.monotonic()
    print(printable(text), file=sys.stderr, flush=True)


def print_json(content: Any) -> None:
    """Print a result to stdout as JSON."""
    print(json.dumps(content, indent=1))
