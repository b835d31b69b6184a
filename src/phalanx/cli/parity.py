"""`phalanx parity`: compare a strategy with one process, in losses and gradients."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from phalanx.cli.options import Job, Json, Set, StrategyLine
from phalanx.cli.output import show_notes
from phalanx.cli.terminal import FAILED, announce, exit_on_error, print_json, require_torch


def parity(
    job: Job,
    strategy: StrategyLine = None,
    steps: Annotated[int, typer.Option(help="Number of steps to compare.")] = 10,
    dtype: Annotated[str, typer.Option(help="Type to compute in: float64 or float32.")] = "float64",
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Compare losses, gradients and gradient norms of a strategy with those of one process, under SGD and AdamW."""
    from phalanx.answers.parity import parity as compare
    from phalanx.answers.plan import with_strategy
    from phalanx.spec.files import job_file

    with exit_on_error():
        require_torch()
        file = with_strategy(job_file.load(job, overrides or ()), strategy)
        show_notes(file.notes)
        result = compare(file, steps, dtype, announce)
        if as_json:
            print_json(result)
        else:
            show_parity(result)
        if not result["passed"]:
            raise typer.Exit(FAILED)


def show_parity(result: dict[str, Any]) -> None:
    """Print the result of `commands.parity.parity`."""
    for row in result["optimizers"]:
        worst = f"  ({row['worst']})" if row["worst"] else ""
        print(f"{row['optimizer']:5}  loss {row['loss_rel_max']:.1e}  gradients {row['grad_rel_max']:.1e}{worst}")
        if row["near_tie"]:
            compared = f"only the {row['steps']} steps before it are compared"
            print(f"{'':7}a router's near-tie in {row['near_tie']}; {compared} (float64 has none)")
    if result["compression"]:
        _show_compression(result)
    verdict = "holds" if result["passed"] else "DOES NOT HOLD"
    figures = ", ".join(f"{key} {result[key]:.1e}" for key in ("loss_rel_max", "grad_rel_max", "bound"))
    print(f"parity of {result['strategy']} in {result['dtype']} over {result['steps']} steps {verdict}: {figures}")


def _show_compression(result: dict[str, Any]) -> None:
    row, steps = result["compression"], result["steps"]
    lost = row["lost_rel_max"]
    kept = "nothing is kept back" if lost is None else f"sent + kept back = gradient to {lost:.1e}"
    print(
        f"compressed, lr = 0: {kept}; the first step is off by {row['first_error']:.2%}, the mean of {steps} by "
        f"{row['mean_error']:.2%}; sgd and adamw above are without compression"
    )
