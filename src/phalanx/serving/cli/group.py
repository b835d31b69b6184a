"""The group of commands `phalanx serve`."""

from __future__ import annotations

import typer

from phalanx.serving.cli.launch import launch
from phalanx.serving.cli.plan import plan
from phalanx.serving.cli.tables import comm, memory, roofline
from phalanx.serving.cli.validate import validate
from phalanx.serving.cli.verify import verify

serve = typer.Typer(help="Serving a trained model: plan, launch, verify, validate.", no_args_is_help=True)
for _command in (plan, launch, memory, comm, roofline, verify, validate):
    serve.command()(_command)
