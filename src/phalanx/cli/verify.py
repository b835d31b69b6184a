"""`phalanx verify`: prove that the program `train` runs does what the plan says, at any world size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import Batch, Gpus, Json, Model, Precision, Report, Seq, Set, StrategyLine
from phalanx.cli.terminal import FAILED, announce, console, exit_on_error, print_json, require_torch, require_writable
from phalanx.spec.errors import InputError

if TYPE_CHECKING:
    from phalanx.answers.verify import Verification
    from phalanx.observation.trainer.verify import Verified


def verify(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN.json|RUN|JOB.toml|FILE",
            help="A plan, a run's folder, a job file, or another framework's configuration; without one, name the "
            "model, the cluster and the rest.",
            show_default=False,
        ),
    ] = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE.toml",
            help="Cluster, also to verify a job file on; it gets as many nodes as the strategy needs.",
        ),
    ] = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = None,
    overrides: Set = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="cpu|cuda",
            help="Tensors of the host, or of a fake GPU: then a wrong device, a wait of the host for the GPU, a "
            "missing kernel or a buffer in flight is named with its line. Needs no GPU.",
        ),
    ] = "cpu",
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Run one real training step of each class of ranks, on fake tensors, and compare it with the plan."""
    with exit_on_error():
        require_torch()
        require_writable("--report", report)
        if device not in ("cpu", "cuda"):
            raise InputError("--device", device, "is neither cpu nor cuda", "use cuda for a fake GPU")
        from phalanx.answers.question import Asked
        from phalanx.answers.verify import as_json as to_json
        from phalanx.answers.verify import run, target

        asked = Asked(path, model, cluster, gpus, batch, seq, strategy, None, precision)
        subject = target(asked, overrides or (), announce)
        for note in subject.notes:
            announce(f"note: {note}")
        result = run(subject, announce, device == "cuda")
        if report is not None:
            from phalanx.report.html.proof import verification

            report.write_text(verification(to_json(result)))
            announce(f"report: {report}")
        if as_json:
            print_json(to_json(result))
        else:
            _show(result)
        if not result.proved:
            raise typer.Exit(FAILED)


def _show(v: Verification) -> None:
    """Print the result, class by class."""
    out, t = console(), v.target
    count, s = t.strategy.accumulation(t.job), t.strategy
    ranks = "1 rank," if s.world == 1 else f"{s.world} ranks, each"
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    out.print(
        f"{t.model.family} decoder, {t.model.parameter_count:,} parameters; {s}: {ranks} {batches} of "
        f"{s.micro_batch} x {t.job.seq} tokens in a step",
        highlight=False,
        soft_wrap=True,
    )
    out.print(f"what is proved: {t.about}", highlight=False, soft_wrap=True)
    if v.on_gpu:
        print("on a fake GPU: its rules are checked, its kernels do not run")
    for verified in v.classes:
        _show_class(v, verified)
    for difference in v.stale:
        print(f"NOT proved: {difference}")
    if len(v.classes) > 1:
        _show_all(v)


def _show_all(v: Verification) -> None:
    """Print what holds for all ranks together, where several steps were taken."""
    seconds, failed = sum(c.seconds for c in v.classes), [c.ranks.rank for c in v.classes if not c.proved]
    if failed:
        ranks = f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}"
        print(f"\nNOT proved: {len(failed)} of {len(v.classes)} steps ({ranks})")
    elif v.proved:
        print(f"\nall {v.target.strategy.world:,} ranks proved by the steps of {len(v.classes)}, in {seconds:.1f} s")


def _show_class(v: Verification, verified: Verified) -> None:
    """Print the collectives, memory and verdict of one class of ranks."""
    from phalanx.answers.verify import collectives
    from phalanx.report.verify import memory, traffic

    out, ranks, world = console(), verified.ranks, v.target.strategy.world
    covered = f"all {world} ranks" if ranks.count == world else f"{ranks.count}: {ranks.description}"
    if world > 1:
        print(f"\nrank {ranks.rank} represents {covered}")
    if verified.failed:
        print(f"NOT proved: {verified.failed}")
        return
    recorded, program = verified.recorded, verified.program
    assert recorded is not None
    count = v.target.strategy.accumulation(v.target.job)
    if recorded.ran < count:
        steady = recorded.ran - 2
        print(f"micro-batch {steady} did what {steady - 1} did, and represents all up to {count - 2} of {count}")
    traffic_here = collectives(program.events)
    if traffic_here:
        out.print(traffic(traffic_here))
    measured = v.target.measured
    rows = [
        ("before the step", program.state.total, recorded.memory.state, None),
        ("peak", program.peak_bytes, recorded.memory.peak, measured),
    ]
    out.print(memory(rows, measured is not None))
    if v.on_gpu:
        _show_waits(recorded.waits, count)
    _show_verdict(verified, v.on_gpu)


def _show_waits(waits: Mapping[str, int], micro_batches: int) -> None:
    """Print how often the host waits for the GPU in a step, and where."""
    total = sum(waits.values())
    print(f"waits of the host for the GPU in a step: {total:,}{'; by line:' if total else ''}")
    for place, times in waits.items():
        print(f"  {times:,} ({times / micro_batches:g} a micro-batch) at {place}")


def _show_verdict(verified: Verified, on_gpu: bool) -> None:
    """Print every difference with its surroundings, or what was proved."""
    from phalanx.observation.diff import slack
    from phalanx.report.verify import context

    events = verified.program.events
    for d in verified.differences:
        print(f"NOT proved: {d}")
        if d.number is not None:
            console().print(context(d.around, d.number))
    if verified.proved:
        collectives, passes = sum(bool(e.axis) for e in events), sum(not e.axis for e in events)
        flops = sum(e.flops for e in events if e.phase != "opt")
        if on_gpu:
            print(
                f"proved in {verified.seconds:.1f} s: {collectives:,} collectives and {passes:,} passes in order, "
                f"{flops:,} FLOP by unit; one device, no other waits, kernels and types that CUDA has, no buffer in "
                f"flight used (live bytes off by {verified.deviation:,}, as its kernels need other scratch memory)"
            )
            return
        print(
            f"proved in {verified.seconds:.1f} s: {collectives:,} collectives and {passes:,} passes in order, "
            f"{flops:,} FLOP by unit, live bytes throughout (off by {verified.deviation:,}; "
            f"{slack(verified.program):,} are allowed)"
        )
