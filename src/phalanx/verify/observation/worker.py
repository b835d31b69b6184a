"""A user's script, observed in a process of its own: its argument is JSON {"script", "module", "arguments", "world",
"ranks", "per_node", "axes", "result"}; `result` is the open file that the observation goes to, as JSON.

The process imports torch once and forks for every rank, so that no rank sees what another has changed. What the
script prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.schedule.observation import Observation, RankObservation, rank_from_json, rank_to_json, to_json
from phalanx.spec.errors import InputError
from phalanx.verify.observation.rank_classes import observe_classes
from phalanx.verify.observation.run import Unobservable, observe_rank, place_of

_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG


def main() -> None:
    """Observe a script at a world size, and write the observation or an error."""
    _end_with_parent()
    task = json.loads(sys.argv[1])
    device, axes = "cpu", dict[str, int](task["axes"])

    def observe(rank: int) -> RankObservation:
        nonlocal device
        answer = _forked(lambda: _answer(task, rank))
        if "error" in answer:
            raise Unobservable(answer["error"])
        device = answer["device"]
        axes.update(answer["axes"])
        return rank_from_json(answer["rank"])

    world = task["world"]
    try:
        if task["ranks"] == "classes":
            ranks = observe_classes(observe, world)
        else:
            ranks = tuple(observe(r) for r in task["ranks"])
        program = " ".join([task["script"] or f"-m {task['module']}", *task["arguments"]])
        content = to_json(Observation(program, world, axes, device, torch.__version__, ranks))
    except Unobservable as error:
        content = {"error": str(error)}
    except KeyboardInterrupt:
        return
    with os.fdopen(task["result"], "w") as file:
        json.dump(content, file)


def _answer(task: dict[str, Any], rank: int) -> dict[str, Any]:
    """Observe one rank, in a process that ends afterwards."""
    here = str(Path(task["script"]).resolve().parent) if task["script"] else os.getcwd()
    sys.path[0] = here

    def program() -> None:
        sys.argv = [task["script"] or task["module"], *task["arguments"]]
        try:
            if task["script"]:
                runpy.run_path(task["script"], run_name="__main__")
            else:
                runpy.run_module(task["module"], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise Unobservable(f"the program exited with {end.code!r}, at {place_of(end)}") from end

    try:
        result, device, axes = observe_rank(program, rank, task["world"], task["per_node"], task["axes"])
    except (Unobservable, InputError) as error:
        return {"error": str(error)}
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        return {"error": f"{type(error).__name__}: {lines[0]}, at {place_of(error)} (rank {rank} of the program)"}
    return {"rank": rank_to_json(result), "device": device, "axes": axes}


def _forked(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` returns in a forked process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        _end_with_parent()
        try:
            try:
                answer = work()
            except BaseException as error:
                if not isinstance(error, KeyboardInterrupt):
                    traceback.print_exc()
                raise
            with os.fdopen(writes, "w") as file:
                json.dump(answer, file)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if not text:
        how = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "no result"
        raise Unobservable(f"the program's process ended with {how}")
    return json.loads(text)  # type: ignore[no-any-return]


def _end_with_parent() -> None:
    """Let Linux end this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGTERM)


if __name__ == "__main__":
    main()
