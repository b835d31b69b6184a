"""Answers to the page's questions, each priced in a warm process of its own: a long search of one tab delays no other
tab, and stopping it ends only its process.

    {"id", "model", "cluster", "stack", "gpus", "batch", "seq", "headroom", "where"}  ->  one line of JSON
    {"html", "charts", "figures", "plan", "report"}  or  {"error"}                      <-  one line of JSON
    {"priced", "legal"}                                               <-  before it, while it takes long
"""

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import BoundedSemaphore, Lock
from typing import Any

from phalanx.answers.question.query import Query
from phalanx.answers.search.model_plan import ModelPlan, model_plan
from phalanx.answers.search.wishes import Wishes
from phalanx.cost.analytic.step import TERM_NAMES
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.report.html.page import body, charts, contents
from phalanx.report.html.plan import data, sections, title
from phalanx.report.plan import lines
from phalanx.report.style import seconds, size
from phalanx.spec.cluster.presets import PRESETS as CLUSTERS
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.plan import to_dict
from phalanx.spec.model.presets import PRESETS as MODELS
from phalanx.spec.strategy.spec import Strategy

NAMES = {"model": sorted(MODELS), "cluster": sorted(CLUSTERS), "stack": list(DOCUMENTED)}
"""Field of a question -> names that the page may ask about: presets alone, so that it can read no file."""
_PROCESSES = 4
"""Questions that are priced at the same time; further ones wait."""
_STOPPED = 1000
"""Stopped questions that are remembered."""
_ANSWERS = 2
"""Answers whose best strategies a process keeps."""


class Planner:
    """Prices questions in processes that are kept warm. Any thread may ask, and stop the question of another."""

    def __init__(self) -> None:
        self._free, self._change = BoundedSemaphore(_PROCESSES), Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: dict[str, None] = {}
        self.progress: dict[str, dict[str, int]] = {}
        """Id of a question that is being priced -> {"priced", "legal"}: its numbers of strategies."""
        self._closed = False

    def warm(self) -> None:
        """Start a process, so that the first question need not wait for its start."""
        with self._change:
            self._idle.append(_new_process())

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a question (see `reply_to`), or {"error": ...} where it failed or was stopped."""
        name = str(question.get("id", ""))
        with self._free:
            with self._change:
                if self._closed or name in self._stopped:
                    self._stopped.pop(name, None)
                    return {"error": "stopped"}
                process = self._idle.pop() if self._idle else _new_process()
                self._busy[name] = process
            reply = _reply_of(process, question, lambda so_far: self.progress.update({name: so_far}))
            with self._change:
                self.progress.pop(name, None)
                self._busy.pop(name, None)
                if reply is not None:
                    self._idle.append(process)
                    return reply
                if name in self._stopped:
                    del self._stopped[name]
                    return {"error": "stopped"}
            return {"error": "the search failed; the terminal of `phalanx ui` says why"}

    def stop(self, name: str) -> None:
        """Stop the question of that id, whether it is priced already or still waits."""
        with self._change:
            if name:
                self._stopped[name] = None
            if len(self._stopped) > _STOPPED:  # ids that were stopped too late stay; the oldest has no use
                del self._stopped[next(iter(self._stopped))]
            if name in self._busy:
                self._busy[name].kill()
                if not self._idle and not self._closed:
                    self._idle.append(_new_process())  # the next question need not wait for its start

    def close(self) -> None:
        """End every process."""
        with self._change:
            self._closed = True
            for process in (*self._idle, *self._busy.values()):
                process.kill()
                process.wait()


def _new_process() -> subprocess.Popen[bytes]:
    """Start a process that runs `serve`, in a session of its own: Ctrl-C in the terminal reaches the server alone."""
    command = [sys.executable, "-m", __name__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _reply_of(
    process: subprocess.Popen[bytes], question: Mapping[str, Any], watch: Callable[[dict[str, int]], None]
) -> dict[str, Any] | None:
    """Return a process's reply; None if it ended. `watch` is called with its progress."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        while True:
            reply: dict[str, Any] = json.loads(process.stdout.readline())
            if "priced" not in reply:
                return reply
            watch(reply)
    except (OSError, ValueError):
        process.kill()
        process.wait()
        return None


def serve() -> None:
    """Answer the questions on stdin until it ends."""
    recent = RecentStrategies()
    with suppress(BrokenPipeError):  # the server has ended
        for line in sys.stdin:
            try:
                reply = reply_to(json.loads(line), _Reporter(), recent)
            except InputError as error:
                reply = {"error": str(error)}
            print(json.dumps(reply), flush=True)


class RecentStrategies:
    """The best strategies of the last answers. As a slider moves by little, they tighten the next search's bounds."""

    def __init__(self) -> None:
        self._last: deque[tuple[Strategy, ...]] = deque(maxlen=_ANSWERS)

    @property
    def strategies(self) -> list[Strategy]:
        """All of them, each once."""
        return list(dict.fromkeys(s for of_answer in self._last for s in of_answer))

    def add(self, first: tuple[Strategy, ...]) -> None:
        """Add the best strategies of an answer."""
        self._last.append(first)


class _Reporter:
    """Writes how far a search is, every third of a second."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 0.3

    def __call__(self, priced: int, legal: int) -> None:
        if time.monotonic() >= self._next:
            self._next += 0.3
            print(json.dumps({"priced": priced, "legal": legal}), flush=True)


def reply_to(
    question: Mapping[str, Any],
    watch: Callable[[int, int], None] | None = None,
    recent: RecentStrategies | None = None,
) -> dict[str, Any]:
    """Return the best plan for a page's question: its sections, figures, plan.json and report. `recent`: strategies
    of earlier questions, to which this one's are added. Raises InputError."""
    recent = recent or RecentStrategies()
    for field, known in NAMES.items():
        if (name := str(question.get(field))) not in known:
            raise InputError(field, name, "is not one that the page offers", nearest(name, known))
    for field in ("gpus", "batch", "seq"):
        if type(question.get(field)) is not int:
            raise InputError(field, question.get(field), "is not a whole number")
    share, where = question.get("headroom"), question.get("where")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise InputError("headroom", str(share), "is not a share of the memory", "0.05 leaves 5 % free")
    headroom = float(share)
    limits = str(where).strip() or None if where else None
    about = {field: str(question[field]) for field in NAMES}
    gpus, batch, seq = (int(question[field]) for field in ("gpus", "batch", "seq"))
    query = Query(None, about["model"], about["cluster"], gpus, batch, seq, stack=about["stack"], where=limits)
    plan = model_plan(query, Wishes(headroom=headroom), watch=watch, known=recent.strategies, fewer=False)
    recent.add(plan.search.first)
    shown = sections(plan, list(lines(plan)))
    return {
        "html": body(shown),
        "charts": charts(shown),
        "figures": _figures(plan, about),
        "plan": json.dumps(to_dict(plan.plan), indent=1) + "\n",
        "report": {"title": title(plan), "links": contents(shown), "data": data(plan)},
    }


def _figures(a: ModelPlan, about: Mapping[str, str]) -> dict[str, str]:
    """Return the figures by which a page compares two answers: name -> value as text."""
    best, q = a.best, a.question
    terms = {
        TERM_NAMES.get(name, name): seconds(t) for name, t in best.terms_s.items() if t > 1e-3 * best.step_time_s
    }
    return {
        **about,
        "GPUs": f"{a.gpus:,}",
        "batch": f"{q.global_batch:,} x {q.seq:,} tokens",
        "strategy": str(a.search.best.strategy),
        "step": seconds(best.step_time_s),
        "tokens/s": f"{best.tokens_per_s:,.0f}",
        "MFU": f"{best.mfu:.1%}",
        "memory": size(best.memory_bytes),
        **terms,
    }


if __name__ == "__main__":
    serve()
