"""`phalanx report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import announce, exit_on_error, require_writable


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/quickstart.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.html", help="Where to write it; by default in the run's folder."),
    ] = None,
) -> None:
    """Write a run's report: loss, throughput, and the measured step under the predicted one; one HTML file.

    A run that still trains can be looked at, too.
    """
    with exit_on_error():
        from phalanx.report.run_page import NAME, of_run
        from phalanx.spec.files.plan import write_text

        require_writable("--out", out)
        text = of_run(run)
        file = out or run / NAME
        require_writable("RUN", file)
        write_text(file, text)
        announce(f"report: {file}")
