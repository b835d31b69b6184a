"""Answers to the page's questions, found in one warm process beside the server: stopping a search ends that process,
and the next question starts another."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from phalanx.commands.priced_plan import plan_of
from phalanx.commands.question import Asked, read
from phalanx.cost.analytic.stacks import STACKS
from phalanx.plan.explain.analytic import AnalyticSubject
from phalanx.plan.search.planner import Answer, answer
from phalanx.plan.search.why_not import TERM_NAMES
from phalanx.report.html.page import body, charts
from phalanx.report.html.plan import report, sections
from phalanx.report.style import seconds, size
from phalanx.spec.cluster.presets import PRESETS as CLUSTERS
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.plan import to_dict
from phalanx.spec.model.presets import PRESETS as MODELS

NAMES = {"model": sorted(MODELS), "cluster": sorted(CLUSTERS), "stack": sorted(STACKS)}
"""What a page may ask about: no file is read for it."""


class Planner:
    """Asks the process beside it, one question at a time; any thread may stop one."""

    def __init__(self) -> None:
        self._one, self._change = Lock(), Lock()
        self._process: Any = None
        self._pipe: Connection | None = None
        self._asked = ""
        self._stopped: set[str] = set()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `answered` says of a question, or {"error": ...} where it was stopped."""
        name = str(question.get("id", ""))
        with self._one:
            with self._change:
                if name in self._stopped:
                    self._stopped.discard(name)
                    return {"error": "stopped"}
                pipe = self._started()
                self._asked = name
            try:
                pipe.send_bytes(json.dumps(question).encode())
                reply: dict[str, Any] = json.loads(pipe.recv_bytes())
                return reply
            except (EOFError, OSError):
                return {"error": "stopped"}
            finally:
                with self._change:
                    self._asked = ""

    def stop(self, name: str) -> None:
        """Stop the question of that id, asked or still waiting; another tab's goes on."""
        with self._change:
            if name and name == self._asked:
                self._process.terminate()
            elif name and len(self._stopped) < 1000:
                self._stopped.add(name)

    def close(self) -> None:
        """End the process."""
        with self._change:
            if self._process is not None:
                self._process.terminate()
                self._process.join()

    def _started(self) -> Connection:
        if self._pipe is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs,), name="phalanx ui: planner", daemon=True)
            self._process.start()
            theirs.close()
        return self._pipe


def serve(pipe: Connection) -> None:
    """Answer questions until the other end closes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which ends this process
    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply = answered(question)
        except InputError as error:
            reply = {"error": str(error)}
        pipe.send_bytes(json.dumps(reply).encode())


def answered(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the best plan for a page's question: its sections, figures, plan.json and report. Raises InputError."""
    for field, known in NAMES.items():
        if (name := str(question.get(field))) not in known:
            raise InputError(field, name, "is not one that the page offers", nearest(name, known))
    for field in ("gpus", "batch", "seq"):
        if type(question.get(field)) is not int:
            raise InputError(field, str(question.get(field)), "is not a whole number")
    share, where = question.get("headroom"), question.get("where")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise InputError("headroom", str(share), "is not a share of the memory", "0.05 leaves 5 % free")
    headroom = float(share)
    limits = str(where).strip() or None if where else None
    about = {field: str(question[field]) for field in NAMES}
    gpus, batch, seq = (int(question[field]) for field in ("gpus", "batch", "seq"))
    asked = read(
        Asked(None, about["model"], about["cluster"], gpus, batch, seq, None, about["stack"], None, limits), True
    )
    result = answer(lambda n: replace(asked.pricing_on(n), headroom=headroom), gpus)
    best = result.best
    subject = AnalyticSubject(
        lambda n: result.pricing if n == gpus else replace(asked.pricing_on(n), headroom=headroom),
        best.strategy,
        gpus,
    )
    shown = sections(result, None, subject)
    plan = plan_of(result.pricing, best.priced, best.run, best.mfu, about["cluster"], asked.precision)
    return {
        "html": body(shown),
        "charts": charts(shown),
        "figures": _figures(result, about),
        "plan": json.dumps(to_dict(plan), indent=1) + "\n",
        "page": report(result, None, subject),
    }


def _figures(a: Answer, about: Mapping[str, str]) -> dict[str, str]:
    """Return what two answers are compared by, as text."""
    best, job = a.best, a.pricing.job
    terms = {
        TERM_NAMES.get(name, name): seconds(t) for name, t in best.priced.terms.items() if t > 1e-3 * best.seconds
    }
    return {
        **about,
        "GPUs": f"{a.gpus:,}",
        "batch": f"{job.global_batch:,} x {job.seq:,} tokens",
        "strategy": str(best.strategy),
        "step": seconds(best.seconds),
        "tokens/s": f"{job.global_batch * job.seq / best.seconds:,.0f}",
        "MFU": f"{best.mfu:.1%}",
        "memory": size(best.priced.bytes_),
        **terms,
    }
