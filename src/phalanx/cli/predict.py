"""`phalanx predict`: estimate the time, memory and FLOPs of a strategy on a cluster that need not exist here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.observed import observation_in, show_price
from phalanx.cli.options import Batch, Cluster, Gpus, Json, Model, Seq, Stack
from phalanx.cli.terminal import announce, console, exit_on_error, print_json

if TYPE_CHECKING:
    from phalanx.cost.analytic.estimate import Estimate


def predict(
    observed: Annotated[
        Path | None,
        typer.Argument(
            metavar="OBSERVED.json",
            help="What `phalanx observe --out` wrote: priced on --cluster; without one, name the model and the rest.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", metavar="LINE", help="Strategy, such as tp=8,pp=4,zero=1; dp takes the remaining ranks."
        ),
    ] = "",
    profile: Stack = "megatron-core",
    precision: Annotated[
        str, typer.Option("--precision", help="Number format of matrix products: bf16, fp16, fp8, fp8-mx or fp4.")
    ] = "bf16",
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show each term's formula with its numbers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict how long a step takes, how much memory it needs and where the time goes, without running anything."""
    with exit_on_error():
        from phalanx.spec.errors import InputError

        if observed is not None:
            seen = observation_in(observed)
            if seen is None:
                raise InputError("observation", str(observed), "is none", "write one with phalanx observe --out")
            show_price(seen, cluster, as_json, collectives=False)
            return
        if model is None or cluster is None or gpus is None or batch is None or seq is None:
            given = {"--model": model, "--cluster": cluster, "--gpus": gpus, "--batch": batch, "--seq": seq}
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise InputError(missing, None, "missing", "phalanx predict needs all of them, or an observed.json")
        prediction, title = _predict(model, cluster, gpus, batch, seq, strategy, profile, precision)
        if as_json:
            print_json(_as_json(prediction, title))
            return

        from phalanx.report.predict import bars, explained, figures

        out = console()
        out.print(figures(prediction, title))
        out.print(bars(prediction, out.width))
        if explain:
            out.print(explained(prediction))


def _predict(
    model: str, cluster: str, gpus: int, batch: int, seq: int, line: str, stack: str, precision: str
) -> tuple[Estimate, str]:
    """Return the prediction and a line that says what it is about. Raises InputError."""
    from phalanx.cost.analytic.estimate import estimate
    from phalanx.plan.question import cluster_named, model_named, require_counts
    from phalanx.schedule.pipeline import stages
    from phalanx.spec.errors import InputError, nearest
    from phalanx.spec.files.job_file import build
    from phalanx.spec.job import Job, Precision
    from phalanx.spec.strategy import spec as strategies
    from phalanx.spec.strategy.spec import Strategy

    formats = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "float8", "fp8-mx": "float8-mx", "fp4": "float4"}
    if precision not in formats:
        raise InputError("--precision", precision, "is not modelled", nearest(precision, formats))
    require_counts(("--gpus", gpus), ("--batch", batch), ("--seq", seq))
    spec, notes = model_named(model)
    for note in notes:
        announce(f"note: {note}")
    described = cluster_named(cluster)(gpus)
    table = strategies.parse(line)
    others = 1
    for axis in ("tp", "pp", "cp"):
        degree = table.get(axis, 1)
        others *= degree if isinstance(degree, int) and degree > 0 else 1  # Strategy refuses anything else below
    if "dp" not in table and gpus % others == 0:
        table["dp"] = gpus // others
    chosen = build(Strategy, table | {"sp": bool(table.get("sp"))}, "strategy")
    compute = "float16" if precision == "fp16" else "bfloat16"
    job = Job(batch, seq, Precision(compute))  # type: ignore[arg-type]
    stages.check(chosen, spec, job, gpus)
    prediction = estimate(spec, described, job, chosen, stack, formats[precision])
    return prediction, f"{model} on {gpus} ranks of {cluster}: {chosen}, {stack}, {precision}"


def _as_json(e: Estimate, title: str) -> dict[str, Any]:
    from phalanx.cost.analytic.estimate import compression_payment

    tokens = e.layout.step_tokens
    memory = e.memory
    return {
        "title": title,
        "step_time_s": float(e.seconds),
        "tokens_per_s_per_gpu": float(tokens / e.seconds / e.layout.world),
        "mfu": float(e.mfu),
        "hfu": float(e.hfu),
        "model_flops": float(e.model_flops),
        "six_n_flops": float(6 * e.active_params * tokens),
        "terms_s": {name: float(value) for name, value in e.step.terms.items()},
        "factors": {name: {k: float(v) for k, v in of.items()} for name, of in e.step.of.items()},
        "memory_bytes": {
            "steady": float(memory.steady),
            "peak": float(memory.peak),
            "reserved": float(memory.reserved),
            "shown": float(memory.shown),
            "usable": float(e.allocatable_bytes),
            "terms": {name: float(value) for name, value in memory.terms.items()},
        },
        "compression": None if (compression := compression_payment(e)) is None else asdict(compression),
        "fits": bool(e.fits),
        "origin": "estimated: formulas with constants fitted on published runs",
    }
