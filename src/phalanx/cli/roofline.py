"""`phalanx roofline`: what bounds a model, and what its communication is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from phalanx.cli.options import (
    Batch,
    Cluster,
    Csv,
    Gpus,
    Json,
    Model,
    OptionalStack,
    Params,
    Plan,
    Plot,
    Precision,
    Seq,
    StackOptionsLine,
    StrategyLine,
)
from phalanx.cli.show import show_notes
from phalanx.cli.tables import print_sheets, require_positive
from phalanx.cli.terminal import exit_on_error, require_drawing
from phalanx.cli.unread import require_only

if TYPE_CHECKING:
    from phalanx.planning.tables.table import Sheet
    from phalanx.report.pictures.figure import Picture


def roofline(
    line: typer.Context,
    plan: Plan = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    params: Params = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Tabulate ridge points of the known systems and, for a strategy, the intensity of each operator.

    To include a strategy name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    with exit_on_error():
        require_drawing(plot)
        from phalanx.planning.tables.roofline import ridges, rooflines

        if params is not None:
            there = cluster or "dgx-h100"
            reason = "is about a strategy, and a number of parameters has no shape to split"
            require_only(line, "params", "cluster", "seq", reason=reason, remedy="leave it out, or --params")

            def of_links() -> list[Picture]:
                from phalanx.report.gallery.hardware import comm_roofline, staircase

                return [comm_roofline(there), staircase(there)]

            sheets = _intensities(params, there, 2048 if seq is None else seq)
            print_sheets(sheets, as_json, as_csv, plot, of="roofline", pictures=of_links)
            return

        asked, sheets = None, [ridges()]
        if plan is None and model is None:
            remedy = "name a --model or a plan.json, or leave it out"
            require_only(line, reason="is about a strategy, of which there is none", remedy=remedy)
        else:
            from phalanx.answers.question import Asked, read

            asked = read(Asked(plan, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options))
            show_notes(asked.notes)
            assert asked.strategy is not None
            sheets += rooflines(asked.pricing, asked.strategy)

        def pictures() -> list[Picture]:
            from phalanx.planning.explain.operators import training
            from phalanx.report.gallery.hardware import compute_roofline, job_roofline

            if asked is None or asked.strategy is None:
                return [compute_roofline()]
            p = asked.pricing
            return [
                job_roofline(p.cluster, f"{asked.strategy} on {p.cluster.name}", training(p, asked.strategy)),
                compute_roofline(),
            ]

        print_sheets(sheets, as_json, as_csv, plot, asked, "roofline", pictures)


def _intensities(params: str, cluster: str, seq: int) -> list[Sheet]:
    """Return the FLOP per byte sent by batch size, over the links inside a node and those between nodes."""
    from phalanx.cost.analytic.chips import system_of
    from phalanx.planning import question
    from phalanx.planning.tables import textbook

    require_positive({"--seq": seq})
    node = question.cluster_named(cluster)(1)
    pair = question.cluster_named(cluster)(2 * node.ranks_per_node)
    peak = float(system_of(pair).peak_bf16)
    rates = {t.name: t.bandwidth_bytes_per_s_per_gpu_per_direction for t in (pair.tiers[0], pair.tiers[-1])}
    count = textbook.counted(params)
    return [textbook.intensity(count, seq, (1, 4, 16, 32, 64, 256), peak, rates[name], name) for name in rates]
