"""Progress display of a run: a live bar on a terminal, a line every ten seconds in a log file."""

from __future__ import annotations

import math
import time
from typing import Any, TextIO

from rich import progress as rich_progress
from rich.console import Console

_LINE_EVERY_S = 10.0
_DOUBT = (
    "note: an MFU above 100% says that this machine was busy when it was measured: phalanx measure measures it again"
)


class Progress:
    """The progress of a run: a live bar on a terminal; elsewhere a plain line for the first step and then every ten
    seconds, in aligned columns."""

    def __init__(self, steps: int, start: int, tokens_per_step: int, stream: TextIO) -> None:
        self.steps, self.start, self.tokens, self.stream = steps, start, tokens_per_step, stream
        self.seconds = 0.0  # per step, smoothed
        self.next_line = time.monotonic()
        self.doubted = False
        self.bar: rich_progress.Progress | None = None
        console = Console(file=stream)
        if console.is_terminal:
            self.bar = rich_progress.Progress(
                rich_progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                rich_progress.BarColumn(),
                rich_progress.TextColumn("{task.description}"),
                rich_progress.TimeRemainingColumn(),
                console=console,
            )
            self.task = self.bar.add_task("", total=steps, completed=start)
            self.bar.start()

    def step(self, row: dict[str, Any]) -> None:
        """Show a step; `row` is its line of metrics.jsonl."""
        step, now = row["step"], row["step_time_s"]
        # The first step of a process is the instrumented one, several times as slow as any other.
        self.seconds = now if step <= self.start + 2 else 0.9 * self.seconds + 0.1 * now
        rate = self.tokens / self.seconds
        held_out = f"  held-out {row['eval_loss']:.3f}" if "eval_loss" in row else ""
        loss, norm = (math.nan if row[key] is None else row[key] for key in ("loss", "grad_norm"))
        if self.bar is not None:
            text = f"loss {loss:.3f}  {rate:,.0f} tokens/s"
            self.bar.update(self.task, completed=step, description=text)
            if held_out:
                self.bar.console.print(f"step {step}: {text}{held_out}", highlight=False)
        elif held_out or step == self.steps or time.monotonic() >= self.next_line:
            left, mfu = (self.steps - step) * self.seconds, row["mfu"] * now / self.seconds
            print(
                f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {loss:7.4f}  lr {row['lr']:.2e}  "
                f"grad norm {norm:8.3g}  {rate:>10,.0f} tokens/s  MFU {mfu:6.1%}  "
                f"{_clock(left):>8} left{held_out}",
                file=self.stream,
                flush=True,
            )
            self.next_line = time.monotonic() + _LINE_EVERY_S
            if mfu > 1 and not self.doubted:
                self.doubted = True
                self.say(_DOUBT)

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, soft_wrap=True, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self.bar is not None:
            self.bar.stop()


def _clock(seconds: float) -> str:
    """Format a duration as m:ss, h:mm:ss, or from 100 hours on as days and hours."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
