"""`phalanx pipeline`: draw, compare, prove and write pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import Json, Plot
from phalanx.cli.terminal import FAILED, announce, console, exit_on_error, print_json, require_drawing

if TYPE_CHECKING:
    from phalanx.cost.pipeline_time import PricedSchedule
    from phalanx.schedule.pipeline.actions import PipelineSchedule

pipeline = typer.Typer(no_args_is_help=True, help="Draw, compare and prove pipeline schedules, or write them as CSV.")
_MOST_COLUMNS = 10_000
_MOST_PASSES = 30_000
"""Forward passes of chunks in a schedule that is proved or priced: 3 seconds of work."""
Ranks = Annotated[int, typer.Option(help="Number of pipeline ranks.")]
MicroBatches = Annotated[int, typer.Option(help="Number of micro-batches per step.")]
Virtual = Annotated[int | None, typer.Option(help="Chunks per rank of the interleaved schedule; 2 by default.")]
CostLine = Annotated[
    str,
    typer.Option(
        "--costs",
        help="Times of F (forward), I (input gradient) and W (weight gradients) of a rank, over all its chunks.",
    ),
]
Transfer = Annotated[float, typer.Option(help="Time of a message from one rank to the next, in the unit of --costs.")]


@contextmanager
def _exit_on_unproved() -> Iterator[None]:
    """Turn expected errors, and schedules that are not provable, into one line and an exit code."""
    from phalanx.schedule.errors import Unproved

    with exit_on_error():
        try:
            yield
        except Unproved as error:
            announce(f"error: {error}")
            raise typer.Exit(FAILED) from None


def _schedule(name: str, ranks: int, micro_batches: int, virtual: int | None) -> PipelineSchedule:
    """Build a schedule by name, or read it from a CSV file. Raises InputError."""
    from phalanx.schedule.pipeline.schedules import build
    from phalanx.schedule.pipeline.torch_csv import from_csv

    if name.endswith(".csv"):
        schedule = from_csv(Path(name))
        _require_few(sum(map(len, schedule.actions)) // 2, "schedule", name)
        return schedule
    passes = max(ranks, 0) * max(virtual or 1, 1) * max(micro_batches, 0)
    _require_few(passes, "--micro-batches" if micro_batches > ranks else "--ranks", max(ranks, micro_batches))
    return build(name, ranks, micro_batches, virtual)


def _require_few(passes: int, field: str, value: object) -> None:
    """Require that a schedule can be followed pass by pass in seconds. Raises InputError."""
    from phalanx.spec.errors import InputError

    if passes > _MOST_PASSES:
        reason = f"{passes:,} forward passes are too many to follow one by one: at most {_MOST_PASSES:,}"
        raise InputError(field, value, reason, "phalanx predict prices a pipeline of any size in closed form")


def _priced(s: PipelineSchedule, costs: str, transfer: float) -> PricedSchedule:
    """Prove a schedule and price it; the chunks of a rank share the rank's costs equally.

    Raises InputError, Unproved.
    """
    from phalanx.cost.pipeline_time import Costs, price
    from phalanx.schedule.pipeline.proof import prove
    from phalanx.schedule.pipeline.sends import strip_sends
    from phalanx.spec.errors import InputError
    from phalanx.spec.ranges import Range

    try:
        times = [float(word) for word in costs.split(",")]
    except ValueError:
        times = []
    if len(times) != 3 or not all(1e-3 <= number <= 1e6 for number in times):
        raise InputError("--costs", costs, "is not three numbers from 0.001 to 1e6", "for F, I and W, such as 1,1,1")
    if problem := Range(0, 1e6).problem(transfer):
        raise InputError("--transfer", transfer, problem)
    prove(s)
    each = s.ranks / s.chunks
    forward, input_grad, weight_grad = (number * each for number in times)
    return price(strip_sends(s), Costs.equal(s.chunks, forward, input_grad, weight_grad, transfer))


def _of_run(name: str) -> tuple[PricedSchedule, PricedSchedule]:
    """Return the traced step of a run, as measured and as predicted."""
    from phalanx.report.pipeline import of_run

    return of_run(Path(name))


@pipeline.command("show")
def pipeline_show(
    names: Annotated[
        list[str],
        typer.Argument(help="Schedules (1f1b, gpipe, interleaved, zb-v, ...), CSV files, or folders of runs."),
    ],
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    virtual: Virtual = None,
    costs: CostLine = "1,1,1",
    transfer: Transfer = 0.0,
    width: Annotated[
        int | None,
        typer.Option(help="Columns of the drawing; by default those of the terminal. Longer ones go on in panels."),
    ] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters alone.")] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Draw schedules over time, on one scale, with their bubble and live activations.

    Of a run, draw its traced step as measured and as predicted.
    """
    with _exit_on_unproved():
        if width is not None and not 20 <= width <= _MOST_COLUMNS:
            from phalanx.spec.errors import InputError

            raise InputError("--width", width, "is no width of a drawing", f"use 20 to {_MOST_COLUMNS}")
        require_drawing(plot)
        runs = [name for name in names if Path(name).is_dir()]
        schedules = [
            _priced(_schedule(n, ranks, micro_batches, virtual), costs, transfer) for n in names if n not in runs
        ]
        measured = [_of_run(name) for name in runs]
        if plot is not None:
            _plot(plot, schedules, list(zip(runs, measured, strict=True)), costs)
        if as_json:
            of_runs = [
                {"run": name, "measured": _figures(real), "predicted": _figures(predicted)}
                for name, (real, predicted) in zip(runs, measured, strict=True)
            ]
            print_json({"schedules": [_figures(p) for p in schedules], "runs": of_runs})
            return

        from phalanx.report.pipeline import chart, columns_per_second, summary

        out = console()
        # Times of runs are seconds, so each run has its own scale.
        groups = [[("", p) for p in schedules]]
        for name, pair in zip(runs, measured, strict=True):
            both = zip(("measured", "predicted"), pair, strict=True)
            groups.append([(f"{name}, {how} in {p.makespan:.3g} s", p) for how, p in both])
        for group in groups:
            scale = columns_per_second([p for _, p in group], width or out.width) if group else 1.0
            for label, priced in group:
                s = priced.schedule
                title = f"{s.name}: {s.ranks} ranks, {s.micro_batches} micro-batches"
                out.print(title + (f"; {label}" if label else ""), style="bold", highlight=False)
                out.print(chart(priced, width or out.width, scale, "." if ascii_only else "·"), soft_wrap=True)
                out.print(summary(priced), highlight=False)
                out.print()


def _plot(
    file: Path,
    schedules: list[PricedSchedule],
    runs: list[tuple[str, tuple[PricedSchedule, PricedSchedule]]],
    costs: str,
) -> None:
    """Draw schedules as one picture, and each run as another. Raises InputError."""
    from phalanx.report.gallery.pipelines import schedules as drawn
    from phalanx.report.pictures.files import write

    source = "`phalanx pipeline show`: the schedules that are proved, priced and run"
    pictures = [drawn([("", p) for p in schedules], f"time: F, I, W = {costs}", source)] if schedules else []
    for name, (real, predicted) in runs:
        both = [(f" of {name}, measured", real), (f" of {name}, predicted", predicted)]
        pictures.append(drawn(both, "time, s", f"the trace of {name}, and `phalanx predict` of its plan"))
    write(pictures, file)
    announce(f"wrote {file}")


@pipeline.command("table")
def pipeline_table(
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    virtual: Virtual = None,
    costs: CostLine = "1,1,1",
    transfer: Transfer = 0.0,
    as_json: Json = False,
) -> None:
    """Compare the memory and the bubble of all schedules."""
    from phalanx.schedule.pipeline.schedules import SCHEDULES
    from phalanx.spec.errors import InputError

    with _exit_on_unproved():
        priced, left_out = [], []
        for name in SCHEDULES:
            try:
                schedule = _schedule(name, ranks, micro_batches, virtual if SCHEDULES[name].takes_virtual else None)
            except InputError as error:
                if ranks < 1 or micro_batches < 1 or (virtual is not None and virtual < 1):
                    raise
                left_out.append(f"{name}: {error}")
                continue
            priced.append(_priced(schedule, costs, transfer))
        if as_json:
            print_json({"schedules": [_figures(p) for p in priced], "left_out": left_out})
            return

        from phalanx.cli.output import show_view
        from phalanx.report.pipeline import compared
        from phalanx.report.view import View

        show_view(View([compared(priced), *(f"left out: {line}" for line in left_out)]))


@pipeline.command("prove")
def pipeline_prove(
    names: Annotated[
        list[str] | None, typer.Argument(help="Schedules or CSV files; by default all schedules.")
    ] = None,
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    virtual: Virtual = None,
    slots: Annotated[
        bool,
        typer.Option(
            "--slots", help="Read the cells of CSV files as time slots: no pass may come before what it needs."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove schedules: every pass runs once and after what it needs, with no deadlock even if sends block."""
    from phalanx.schedule.errors import Unproved
    from phalanx.schedule.pipeline.proof import prove, prove_slots
    from phalanx.schedule.pipeline.schedules import SCHEDULES
    from phalanx.schedule.pipeline.torch_csv import cells
    from phalanx.spec.errors import InputError

    proofs = []
    with exit_on_error():
        others = [name for name in names or SCHEDULES if not name.endswith(".csv")]
        if slots and others:
            reason = f"only the cells of a CSV file are time slots, and {others[0]} is not one"
            raise InputError("--slots", None, reason, "name files, or leave it out")
        for name in names or SCHEDULES:
            only = virtual if names or SCHEDULES[name].takes_virtual else None
            schedule = _schedule(name, ranks, micro_batches, only)
            try:
                if slots:
                    prove_slots(schedule, cells(Path(name)))
                proof = prove(schedule)
            except Unproved as error:
                proofs.append({"schedule": schedule.name, "proved": False, "reason": str(error)})
                if not as_json:
                    print(f"{schedule.name}: {error}")
                continue
            row = {"messages": proof.messages, "live_by_rank": list(proof.peak)}
            proofs.append({"schedule": schedule.name, "proved": True, **row})
            if not as_json:
                live = ", ".join(map(str, proof.peak))
                print(f"{schedule.name}: proved; {proof.messages} messages; live at most, by rank: {live}")
        if as_json:
            print_json(proofs)
        if not all(row["proved"] for row in proofs):
            raise typer.Exit(FAILED)


@pipeline.command("csv")
def pipeline_csv(
    name: Annotated[str, typer.Argument(help="Schedule: 1f1b, gpipe, interleaved, zb-v, ...")],
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    virtual: Virtual = None,
    sends: Annotated[bool, typer.Option("--sends", help="Include sends and receives.")] = False,
) -> None:
    """Print a schedule as the CSV that torch.distributed.pipelining and torchtitan load: a line per rank."""
    from phalanx.schedule.pipeline.proof import prove
    from phalanx.schedule.pipeline.sends import insert_sends, strip_sends
    from phalanx.schedule.pipeline.torch_csv import to_csv

    with _exit_on_unproved():
        schedule = _schedule(name, ranks, micro_batches, virtual)
        prove(schedule)
        bare = strip_sends(schedule)
        print(to_csv(insert_sends(bare) if sends else bare), end="")


def _figures(priced: PricedSchedule) -> dict[str, Any]:
    s = priced.schedule
    return {
        "name": s.name,
        "ranks": s.ranks,
        "micro_batches": s.micro_batches,
        "chunks": s.chunks,
        "makespan": priced.makespan,
        "bubble_fraction": priced.bubble_fraction,
        "bubble_overhead": priced.bubble_overhead,
        "peak_activations": list(priced.peak),
        "messages": priced.messages,
    }
