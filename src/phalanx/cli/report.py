"""`phalanx report`: a run as one HTML file, and how its tokens were spread over its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display
from phalanx.cli.terminal import announce, require_writable

report = forms(
    "Write a run's report as one HTML file, or show the load of its experts.",
    {
        "run": Form(f"{__name__}:of_run", "Loss, throughput, and the measured step under the predicted one."),
        "experts": Form(f"{__name__}:of_experts", "How a run's tokens were spread over its experts."),
    },
    lambda _: "run",
)


@command
def of_run(run: Path, out: Path | None = None) -> None:
    """Write a run's report: loss, throughput, and the measured step under the predicted one; one HTML file.

    A run that still trains can be looked at, too.

    run RUN: The folder of a run, such as runs/quickstart.
    --out FILE.html: Where to write it; by default in the run's folder.
    """
    from phalanx.report.run_page import NAME
    from phalanx.report.run_page import of_run as page
    from phalanx.spec.files.plan import write_text

    require_writable("--out", out)
    text = page(run)
    file = out or run / NAME
    require_writable("RUN", file)
    write_text(file, text)
    announce(f"report: {file}")


@command
def of_experts(run: Path, output: Annotated[Display, "json", "save"]) -> None:
    """Show the busiest expert's load over the mean, layer by layer, in the course of a run."""
    from phalanx.answers.experts import expert_balance

    output.show(expert_balance(run))
