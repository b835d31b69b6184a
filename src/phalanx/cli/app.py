"""The command line: every command parses its options, calls `phalanx.answers` and renders the result.

Nothing heavy is imported before a command runs, so that `--help` is quick.

Exit codes: 0 done; 1 a check or a rank failed; 2 the input was wrong; 130 interrupted, state saved.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from phalanx.cli.clusters import clusters
from phalanx.cli.collectives import collectives
from phalanx.cli.comm import comm
from phalanx.cli.compare import compare
from phalanx.cli.doctor import doctor
from phalanx.cli.experts import experts
from phalanx.cli.explain import explain, lint
from phalanx.cli.export import export
from phalanx.cli.generate import generate
from phalanx.cli.measure import measure
from phalanx.cli.memory import memory
from phalanx.cli.mesh import mesh
from phalanx.cli.models import models
from phalanx.cli.observe import observe
from phalanx.cli.parity import parity
from phalanx.cli.pipeline import pipeline
from phalanx.cli.plan import plan
from phalanx.cli.predict import predict
from phalanx.cli.read import read
from phalanx.cli.report import report
from phalanx.cli.roofline import roofline
from phalanx.cli.root import OneLineErrors, only
from phalanx.cli.scaling import scaling
from phalanx.cli.sweep import sweep
from phalanx.cli.terminal import INTERRUPTED, Screened
from phalanx.cli.train import train
from phalanx.cli.ui import ui
from phalanx.cli.validate import validate
from phalanx.cli.verify import verify
from phalanx.cli.weights import export_weights, import_weights
from phalanx.serving.cli.group import serve
from phalanx.shared_cluster.cli.group import cluster
from phalanx.textbook.cli.group import learn

app = typer.Typer(
    cls=OneLineErrors,
    help="Plan, prove, run and measure the parallel training of large models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


app.add_typer(collectives, name="collectives")
app.add_typer(pipeline, name="pipeline")
app.add_typer(experts, name="experts")
app.add_typer(cluster, name="cluster")
app.add_typer(serve, name="serve")
app.add_typer(learn, name="learn")
app.command()(models)
app.command()(clusters)
app.command()(mesh)
app.command()(predict)
app.command()(validate)
app.command()(explain)
app.command()(lint)
for _tables in (scaling, memory, comm, roofline):
    app.command()(_tables)
app.command()(verify)
app.command()(observe)
app.command()(compare)
app.command()(report)
app.command()(doctor)
app.command()(ui)
app.command()(measure)
app.command()(read)
app.command()(export)
app.command("import")(import_weights)
app.command("export-weights")(export_weights)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from phalanx import __version__

        print(f"phalanx {__version__}")
        raise typer.Exit


for _command in (plan, train, sweep, generate, parity):
    app.command()(_command)


def main() -> None:
    """Run the command line. Interrupted, the process ends without the seconds that the teardown of torch may take."""
    # Imported modules live to the end; rescanning them at every collection costs a quick command a fifth of its time.
    gc.set_threshold(50_000)
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = Screened(sys.stdout)
    only(app, sys.argv[1:])
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # the reader is gone
                    stream.flush()
            os._exit(INTERRUPTED)
        raise
