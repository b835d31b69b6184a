"""How `plan` and `train` print decisions and outcomes: as text, and as JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from phalanx.cli.output import show_view
from phalanx.cli.terminal import console

if TYPE_CHECKING:
    from phalanx.answers.plan import Decision
    from phalanx.answers.train import Outcome


def show_decision(decision: Decision, rows: int, choices: bool = False) -> None:
    """Print the chosen strategy among at most `rows` alternatives, its buckets and its chunks."""
    from phalanx.answers.plan import job_plan
    from phalanx.report.job_plan import view

    show_view(view(job_plan(decision), choices, rows))


def show_batch(decision: Decision) -> None:
    """Print the global batch, factor by factor, and the peak learning rate."""
    s, job, train = decision.plan.strategy, decision.plan.job, decision.plan.train
    print(
        f"effective batch {job.global_batch} = micro-batch {s.micro_batch} x accumulation {s.accumulation(job)}"
        f" x dp {s.dp} sequences of {job.seq} tokens; peak lr {train.scaled_lr(job.global_batch):g}"
        f" (lr_scaling = {train.lr_scaling})",
        flush=True,
    )


def outcome_json(outcome: Outcome, sample: str) -> dict[str, Any]:
    """Return how a run ended as `phalanx train --json` prints it."""
    return {
        "run": os.path.relpath(outcome.folder),
        "interrupted": outcome.recorded["interrupted"],
        "last_step": outcome.recorded["last_step"],
        "eval_loss": outcome.recorded["eval_loss"],
        "unigram_entropy": outcome.unigram_entropy,
        "sample": sample,
        "comparison": [
            {"name": c.name, "predicted": c.predicted, "measured": c.measured, "error": c.error}
            for c in outcome.comparisons
        ],
        "differences": list(outcome.differences),
        "timeline": outcome.recorded["timeline"],
    }


def show_outcome(outcome: Outcome) -> None:
    """Print how a run ended, and how it compares with its plan."""
    from phalanx.report.train import comparison, step_times
    from phalanx.report.view import View

    out = console()
    loss, entropy = outcome.recorded["eval_loss"], outcome.unigram_entropy
    if loss is not None:
        out.print(
            f"validation loss {loss:.3f} nat per token; unigram entropy of the training tokens {entropy:.3f} "
            f"({entropy - loss:.3f} better)",
            highlight=False,
            soft_wrap=True,
        )
    count = len(outcome.recorded["events"])
    if count:
        show_view(View([comparison(outcome.comparisons)]))
    if not count:
        out.print("no step was recorded, so there is none to compare with the plan", highlight=False)
    elif outcome.differences:
        for line in outcome.differences:
            out.print(f"recorded step differs from the plan: {line}", highlight=False)
    else:
        except_routed = (
            ", but for what the router decides: rows to experts, and their FLOPs" if outcome.routed else ""
        )
        line = f"the recorded step equals the plan: {count} events, FLOPs of every unit{except_routed}"
        out.print(line, highlight=False, soft_wrap=True)
    timeline = outcome.recorded["timeline"]
    if timeline is not None:
        trace = os.path.relpath(outcome.folder / "trace.json") if timeline["traced_step"] else ""
        line = step_times(outcome.recorded["step_time_s"], timeline, trace)
        out.print(line, highlight=False, soft_wrap=True)
    out.print(f"run: {os.path.relpath(outcome.folder)}/", highlight=False, soft_wrap=True)
