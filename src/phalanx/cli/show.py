"""How `plan` and `train` print decisions and outcomes: as text, and as JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from phalanx.cli.terminal import announce, console

if TYPE_CHECKING:
    from phalanx.answers.plan import Decision
    from phalanx.answers.train import Outcome


def decision_json(decision: Decision) -> dict[str, Any]:
    """Return a decision as `phalanx plan JOB.toml --json` prints it."""
    search = decision.searched
    return {
        "strategies_evaluated": search.legal if search else 1,
        "strategies_priced_one_by_one": len(decision.candidates),
        "exhaustive": search.exhaustive if search else True,
        "best": {"strategy": str(decision.chosen.as_requested), **decision.plan.prediction},
        "bucket": decision.plan.choices["bucket"],
        "chunks": decision.plan.choices["chunks"],
        "collectives": decision.plan.choices["collectives"],
        "alternatives": [
            {
                "strategy": str(c.as_requested),
                "step_time_s": float(c.prediction.step_time_s),
                "memory_bytes": int(c.prediction.memory_bytes),
                "rejected": c.reason,
            }
            for c in decision.candidates
        ],
    }


def show_notes(notes: tuple[str, ...]) -> None:
    """Print notes to stderr."""
    for note in notes:
        announce(f"note: {note}")


def show_decision(decision: Decision, rows: int) -> None:
    """Print the chosen strategy beside at most `rows` alternatives, its buckets and its chunks."""
    from phalanx.planning.auto.bucket_size import GIVEN
    from phalanx.report.plan import alternatives, searched
    from phalanx.spec.byte_sizes import write_bytes

    out = console()
    p = decision.plan
    origin = p.choices["rates_origin"]
    out.print(
        f"{p.model.family} decoder, {p.model.parameter_count:,} parameters; {p.cluster.name}: "
        f"{p.cluster.ranks} x {p.cluster.device.name}, rates {origin}",
        highlight=False,
        soft_wrap=True,
    )
    out.print(alternatives(decision.candidates, decision.chosen, p.job, rows))
    if decision.searched:
        out.print(searched(decision.searched), highlight=False, soft_wrap=True)
    bucket = p.choices["bucket"]
    if bucket and bucket["reason"] != GIVEN:
        size = write_bytes(bucket["bytes"])
        out.print(f"buckets of {size}: {bucket['reason']}", highlight=False, soft_wrap=True)
    chunks = p.choices["chunks"]
    if chunks:
        from phalanx.report.pipeline import parts

        out.print(f"chunks: {chunks['reason']}; imbalance {chunks['imbalance']:.1%}", highlight=False, soft_wrap=True)
        out.print(parts(chunks["chunks"]))


def show_choices(decision: Decision) -> None:
    """Print which transport and algorithm serve which collective, by size."""
    from phalanx.report.collectives import choices

    chosen = decision.plan.collectives
    for op, ranks, hosts in dict.fromkeys((c.op, c.group_size, c.hosts) for c in chosen):
        print(f"{op} over {ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else ""))
        for line in choices([c for c in chosen if (c.op, c.group_size, c.hosts) == (op, ranks, hosts)]):
            print(f"  {line}")
    if not chosen:
        print("collectives: those of torch.distributed; no other was measured on this cluster")


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
        out.print(comparison(outcome.comparisons))
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
