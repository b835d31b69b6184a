"""A function called in a process in which nothing has run: torch's autograd engine knows the devices of its first
backward pass only, and a worker of the suite has had one."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from support.rank_pool import importing_as_here


def in_fresh_process(function: Callable[..., Any], *args: Any, patience_s: float = 120) -> Any:
    """Return what a picklable function returns, or raise what it raises."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["support.preload"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(theirs, function, args), daemon=True)
    with importing_as_here():
        process.start()
    theirs.close()
    try:
        assert ours.poll(patience_s), f"no answer of {function.__name__}"
        result, error = ours.recv()
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise error
    return result


def _call(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((function(*args), None))
    except Exception as error:
        pipe.send((None, error))
