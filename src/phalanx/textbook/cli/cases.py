"""`phalanx learn cases`: published trainings compared with the choice of a search, and the tree of decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import (
    Batch,
    Cluster,
    Csv,
    Gpus,
    Json,
    Model,
    Plot,
    Seq,
)
from phalanx.cli.terminal import announce, exit_on_error, print_json, require_drawing


def cases(
    rules: Annotated[
        bool, typer.Option("--rules", help="Examine the usual rules of thumb, and list when each axis pays.")
    ] = False,
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Draw the usual tree of decisions; with --model and so on, mark a job's path."),
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Say what was published of each training, without a search.")
    ] = False,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Compare the strategies of published trainings, as measured and as predicted, with what a search chooses."""
    with exit_on_error():
        require_drawing(plot)
        if tree:
            if as_csv:
                from phalanx.spec.errors import InputError

                raise InputError("--csv", None, "has no columns for a tree", "use --json")
            _draw_tree(model, cluster, gpus, batch, seq, plot, as_json)
            return
        if any(value is not None for value in (model, cluster, gpus, batch, seq)):
            from phalanx.spec.errors import InputError

            raise InputError("--model", model, "goes with --tree alone", "add --tree, or leave the job out")
        if plot is not None:
            from phalanx.spec.errors import InputError

            raise InputError("--plot", str(plot), "draws the tree alone", "add --tree, or leave it out")
        from phalanx.textbook.cases import case_studies as studied
        from phalanx.textbook.cases import rules_of_thumb as taught

        if rules:
            from phalanx.textbook.cases import criteria

            sheets = [taught.sheet(), criteria.sheet()]
        elif published:
            sheets = [studied.published()]
        else:
            from phalanx.progress import in_progress

            results = in_progress(
                map(studied.study, studied.CASES), "trainings studied", announce, len(studied.CASES)
            )
            sheets = [studied.sheet(list(results))]
        from phalanx.answers.tables import Tables
        from phalanx.cli.output import Output

        Output(as_json, as_csv).show(Tables(None, tuple(sheets)))


def _draw_tree(
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    seq: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the tree of decisions, with a job's path if one is given. Raises InputError for half a job."""
    from phalanx.planning import lookup as question
    from phalanx.planning.explain import decision_tree
    from phalanx.spec.errors import InputError

    asked = {"--model": model, "--cluster": cluster, "--gpus": gpus, "--batch": batch, "--seq": seq}
    facts = None
    if any(value is not None for value in asked.values()):
        missing = next((name for name, value in asked.items() if value is None), None)
        if missing:
            raise InputError(
                missing, None, "is missing", "a path needs --model, --cluster, --gpus, --batch and --seq"
            )
        question.require_counts(("--gpus", gpus or 0), ("--batch", batch or 0), ("--seq", seq or 0))
        spec, _ = question.model_named(str(model))
        there = question.cluster_named(str(cluster))(int(gpus or 0))
        facts = decision_tree.facts(spec, there, int(gpus or 0), int(batch or 0), int(seq or 0))
    path = None if facts is None else decision_tree.walk(facts)[0]
    from phalanx.report.pictures.files import panel_text, write
    from phalanx.textbook.gallery.choosing import decisions

    drawn = decisions(path, f"{model} on {gpus} GPUs of {cluster}" if path else "")
    if plot is not None:
        write([drawn], plot)
        announce(f"wrote {plot}")
    if as_json:
        print_json(decision_tree.as_json(facts))
        return
    for panel in drawn.panels:
        print("\n".join(panel_text(panel)))
