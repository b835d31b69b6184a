"""A training rank that kills itself: `python -m support.killed_rank ARGUMENT`.

POISON is a JSON list with one entry [signal, rank, text, n] per attempt: the rank sends itself the signal when it
reports, for the n-th time, an event that begins with the text, or any collective ("a collective"). Of rank -1 the
launcher gets it, when rank 0 is there. Instead of a signal, "raise" raises an exception, "slow" sleeps for two
seconds, "clock" sets this process's clock back by a day. Attempts beyond the list run undisturbed. Each entry that
takes effect writes its time to the file named by STRUCK.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from phalanx.runtime.process.agent import LAUNCHER_VARIABLE, RESTARTS_VARIABLE
from phalanx.runtime.process.status import StatusPage
from phalanx.training import worker


def _strike() -> None:
    strokes, attempt = json.loads(os.environ["POISON"]), int(os.environ[RESTARTS_VARIABLE])
    if attempt >= len(strokes) or max(strokes[attempt][1], 0) != int(os.environ["RANK"]):
        return
    name, victim, begins, nth = strokes[attempt]
    whom = os.getpid() if victim >= 0 else int(os.environ[LAUNCHER_VARIABLE])
    seen = 0

    def after(text: str) -> None:
        nonlocal seen
        seen += text.startswith(begins)
        if text.startswith(begins) and seen == nth:
            Path(os.environ["STRUCK"]).write_text(str(time.monotonic()))
            if name == "raise":
                raise RuntimeError("struck")
            if name == "slow":
                time.sleep(2)
            elif name == "clock":
                real = time.time
                time.time = lambda: real() - 86400
            else:
                os.kill(whom, signal.Signals[name])

    now, arrive = StatusPage.now, StatusPage.arrive

    def now_and_strike(self: StatusPage, text: str) -> None:
        now(self, text)
        after(text)

    def arrive_and_strike(self: StatusPage, text: str, *rest: object) -> None:
        arrive(self, text, *rest)  # type: ignore[arg-type]
        after("a collective" if begins == "a collective" else text)

    StatusPage.now, StatusPage.arrive = now_and_strike, arrive_and_strike  # type: ignore[method-assign]


def main() -> None:
    _strike()
    worker.main()


if __name__ == "__main__":
    main()
