"""What is shown of a run: metrics.jsonl, a line per step, which goes on where a run is resumed; and its progress, a
live bar on a terminal, a line every ten seconds in a log file.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich import progress as rich_progress
from rich.console import Console

from phalanx.runtime.comm.timeline import StepTimes
from phalanx.spec.files.plan import Plan
from phalanx.training.expert_load import summary
from phalanx.training.training_step import StepResult


def line(
    plan: Plan, step: int, result: StepResult, lr: float, seconds: float, times: StepTimes | None, memory_bytes: int
) -> dict[str, Any]:
    """Return the line of metrics.jsonl for step number `step` (from 0), which took `seconds`. `times`: its compute
    and communication; None if they were not measured."""
    peak, flops = plan.choices["peak_flops_per_s"], plan.prediction["flops"]
    axes = None if times is None else times.axes
    return {
        "step": step + 1,
        "loss": _finite(result.loss),
        "grad_norm": _finite(result.grad_norm),
        "lr": lr,
        "tokens": result.tokens,
        "step_time_s": seconds,
        "tokens_per_s": result.tokens / seconds,
        "mfu": plan.prediction.get("model_flops", flops) / seconds / peak,
        "hfu": flops / seconds / peak,
        "mem_bytes": memory_bytes,
        "exposed_communication_s": None if axes is None else {a: t.exposed_s for a, t in axes.items()},
        "overlap": None if axes is None else {a: t.overlap for a, t in axes.items()},
        "skipped": result.skips,
        "loss_scale": result.loss_scale,
        **({"skipped_because": result.skipped} if result.skipped else {}),
        **(summary(result.loads) if result.loads else {}),
    }


def _finite(x: float) -> float | None:
    """Return x, or None for NaN and infinities, which JSON does not have."""
    return x if math.isfinite(x) else None


@contextmanager
def lines_after(folder: Path, start: int, first: bool) -> Iterator[TextIO | None]:
    """Yield metrics.jsonl, opened to append after the line of step `start`; later lines belong to steps that run
    again, and are removed. Yields None on ranks other than the first."""
    if not first:
        yield None
        return
    path = folder / "metrics.jsonl"
    lines = []
    if start and path.exists():
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= start:
                    lines.append(line + "\n")
            except (json.JSONDecodeError, KeyError):
                continue  # the half-written last line of a killed run
    part = path.with_name(".metrics.jsonl")
    part.unlink(missing_ok=True)  # it may be a link
    part.write_text("".join(lines))
    os.replace(part, path)
    with path.open("a") as file:
        yield file


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
