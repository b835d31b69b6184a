"""What all commands share: exit codes, mistakes as one line, JSON.

Exit codes: 0 done; 1 a check or a rank failed; 2 the input was wrong; 130 interrupted, state saved.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]


@contextmanager
def mistakes() -> Iterator[None]:
    """Turn what can go wrong into one line and an exit code."""
    from phalanx.spec.errors import InputError

    try:
        yield
    except InputError as error:
        announce(f"error: {error}")
        raise typer.Exit(WRONG_INPUT) from None
    except KeyboardInterrupt:
        announce("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        announce(f"error: {error}")
        raise typer.Exit(FAILED) from None
    except RuntimeError as error:
        # These speak for themselves; anything else is our own fault and shows its trace.
        if type(error).__name__ not in ("RankFailure", "CheckpointError", "ReplicasDiffer", "LabError"):
            raise
        announce(f"error: {error}")
        raise typer.Exit(WRONG_INPUT if getattr(error, "wrong_input", False) else FAILED) from None


def require_torch() -> None:
    """That this is more than an installation for planning. Raises InputError."""
    import importlib.util

    from phalanx.spec.errors import InputError

    for name in ("torch", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            raise InputError("installation", None, f"{name} is not installed", "pip install 'phalanx[train]'")


def require_writable(option: str, file: Path | None) -> None:
    """That a file can be written there, before anything starts. Raises InputError."""
    from phalanx.spec.errors import InputError

    if file is None:
        return
    if file.is_dir():
        raise InputError(option, str(file), "is a folder", "name a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        mend = "" if file.parent.is_dir() else "make its folder first"
        raise InputError(option, str(file), "cannot be written", mend)


def console() -> Console:
    """As wide as the terminal; wide enough for every table where there is none."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def announce(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1))
