"""What a person sees while a run goes on: a bar on a terminal, now and then a line in a log file."""

from __future__ import annotations

import time
from typing import Any, TextIO

from rich import progress as rich_progress
from rich.console import Console

_LINE_EVERY_S = 10.0


class Progress:
    """Shows step, loss and tokens/s. On a terminal a live bar; elsewhere one plain line every ten seconds."""

    def __init__(self, steps: int, start: int, tokens_per_step: int, stream: TextIO) -> None:
        self.steps, self.tokens = steps, tokens_per_step
        self.console = Console(file=stream)
        self.seconds = 0.0
        self.next_line = time.monotonic()
        self.bar: rich_progress.Progress | None = None
        if self.console.is_terminal:
            self.bar = rich_progress.Progress(
                rich_progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                rich_progress.BarColumn(),
                rich_progress.TextColumn("{task.description}"),
                rich_progress.TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=steps, completed=start)
            self.bar.start()

    def step(self, row: dict[str, Any]) -> None:
        now = row["step_time_s"]
        self.seconds = now if not self.seconds else 0.9 * self.seconds + 0.1 * now
        held_out = f"  held-out {row['eval_loss']:.3f}" if "eval_loss" in row else ""
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
        text = f"loss {loss}  {self.tokens / self.seconds:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=row["step"], description=text)
            if held_out:
                self.bar.console.print(f"step {row['step']}: {text}{held_out}", highlight=False)
        elif held_out or row["step"] == self.steps or time.monotonic() >= self.next_line:
            self.console.print(f"step {row['step']}/{self.steps}  {text}{held_out}", highlight=False)
            self.next_line = time.monotonic() + _LINE_EVERY_S

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
