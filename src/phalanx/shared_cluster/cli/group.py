"""The commands `phalanx cluster ...`. (`phalanx presets clusters` lists the cluster presets.)"""

from __future__ import annotations

import typer

from phalanx.shared_cluster.cli.place import place
from phalanx.shared_cluster.cli.read import read
from phalanx.shared_cluster.cli.simulate import simulate
from phalanx.shared_cluster.cli.validate import validate

cluster = typer.Typer(
    help="Shared clusters: read their topology, place a job, simulate a queue.", no_args_is_help=True
)
for _command in (simulate, place, read, validate):
    cluster.command()(_command)
