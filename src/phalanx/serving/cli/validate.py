"""`phalanx serve validate`: compare predicted times of serving engines with measured ones."""

from __future__ import annotations

from pathlib import Path

from phalanx.cli.command import command
from phalanx.cli.terminal import console, print_json


@command
def validate(runs: Path | None = None, json: bool = False) -> None:
    """Predict every measured run of an engine: seconds per output token (TPOT) and to the first token (TTFT).

    --runs FILE.csv: Your own measured runs, in the columns of the published ones that ship with Phalanx.
    """
    from phalanx.serving.validation.predictions import loaded
    from phalanx.serving.validation.scores import compare, scores

    summary = scores(*compare(loaded(runs)))
    if json:
        print_json(summary)
        return

    from phalanx.serving.validation import large_ep, report

    out = console()
    out.print(report.parts(summary, "model", "by model: absolute error in percent, mean / median"))
    out.print(report.parts(summary, "gpu", "by GPU: absolute error in percent, mean / median"))
    out.print(report.engines(summary))
    out.print(report.large_ep(large_ep.runs()))
    out.print(report.notes(summary), highlight=False)
