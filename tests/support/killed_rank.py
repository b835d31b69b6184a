"""A training rank that kills itself: `python -m support.killed_rank ARGUMENT`.

POISON is a JSON list with one entry [signal, rank, text, n] per attempt: the rank sends itself the signal when it
reports, for the n-th time, an event that begins with the text. "raise" instead of a signal raises an exception there.
Attempts beyond the list run undisturbed. Each entry that takes effect writes its time to the file named by STRUCK.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from phalanx.runtime.process.launch import RESTARTS_VARIABLE
from phalanx.runtime.process.status import StatusPage
from phalanx.train import worker


def _strike() -> None:
    strokes, attempt = json.loads(os.environ["POISON"]), int(os.environ[RESTARTS_VARIABLE])
    if attempt >= len(strokes) or strokes[attempt][1] != int(os.environ["RANK"]):
        return
    name, _, begins, nth = strokes[attempt]
    seen = 0

    def after(text: str) -> None:
        nonlocal seen
        seen += text.startswith(begins)
        if text.startswith(begins) and seen == nth:
            Path(os.environ["STRUCK"]).write_text(str(time.monotonic()))
            if name == "raise":
                raise RuntimeError("struck")
            os.kill(os.getpid(), signal.Signals[name])

    now, arrive = StatusPage.now, StatusPage.arrive

    def now_and_strike(self: StatusPage, text: str) -> None:
        now(self, text)
        after(text)

    def arrive_and_strike(self: StatusPage, text: str, *rest: object) -> None:
        arrive(self, text, *rest)  # type: ignore[arg-type]
        after(text)

    StatusPage.now, StatusPage.arrive = now_and_strike, arrive_and_strike  # type: ignore[method-assign]


def main() -> None:
    _strike()
    worker.main()


if __name__ == "__main__":
    main()
