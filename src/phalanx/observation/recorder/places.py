"""Lines of a program: where a call was issued or an error raised, outside of torch and of the observing code."""

import contextlib
import os
import sys
import threading
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

import torch
import typing_extensions

from phalanx.runtime.tracing import instrument
from phalanx.schedule.observation import Site

_PACKAGE = Path(__file__).parents[2]
TORCH = (
    str(Path(torch.__file__).parent),
    typing_extensions.__file__,  # wrappers around deprecated functions
    contextlib.__file__,  # and around calls inside a context
    "<frozen ",
    "<string>",
)
OUTSIDE_PHALANX = (*TORCH, str(_PACKAGE))
"""Beginnings of file names to skip in a user's program."""
OUTSIDE_OBSERVATION = (*TORCH, str(_PACKAGE / "observation"), instrument.__file__)
"""Beginnings of file names to skip in a step of our own."""


@cache
def _skipped(file: str, skip: tuple[str, ...]) -> bool:
    return file.startswith(skip)


def _site(frame: FrameType | None, skip: tuple[str, ...]) -> Site | None:
    while frame is not None and _skipped(frame.f_code.co_filename, skip):
        frame = frame.f_back
    return None if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def innermost() -> Site | None:
    """Return the innermost line of this thread outside torch and Phalanx, if any, with the file's full name."""
    return _site(sys._getframe(1), OUTSIDE_PHALANX)


def caller_line(skip: tuple[str, ...] = OUTSIDE_PHALANX, main: int | None = None) -> Site:
    """Return the innermost line of the caller's program on the stack. On a thread of autograd it is the line at which
    the main thread waits in backward(). `skip`: beginnings of paths whose lines do not count; `main`: identifier of
    that thread, by default the process's main thread."""
    main = threading.main_thread().ident if main is None else main
    site = _site(sys._getframe(1), skip)
    if site is None and threading.get_ident() != main and main is not None:
        site = _site(sys._current_frames().get(main), skip)
    return Site() if site is None else shortened(site)


def raised(error: BaseException, skip: tuple[str, ...] = OUTSIDE_PHALANX) -> Site:
    """Return the innermost line, among those not skipped, from which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([f for f in frames if not f.filename.startswith(skip)] or frames)[-1]
    return shortened(Site(frame.filename, frame.lineno or 0, frame.name))


def shortened(site: Site) -> Site:
    """Return the same line with its file relative to the package's sources or to the working folder, if below."""
    return site._replace(file=_relative(site.file, os.getcwd()))


@cache
def _relative(file: str, folder: str) -> str:
    path = Path(file)
    for parent in (_PACKAGE.parent, Path(folder)):
        if path.is_relative_to(parent):
            return str(path.relative_to(parent))
    return file
