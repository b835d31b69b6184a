"""`phalanx tables mesh`: which rank is where, and over which links each of its groups talks.

phalanx tables mesh --strategy tp=8,pp=2,dp=2 --cluster dgx-h100    all ranks, node by node
phalanx tables mesh groups plan.json --axis ep                      all groups of an axis
phalanx tables mesh plan.json --rank 37                             one rank's place and groups
"""

from pathlib import Path

from phalanx.cli.command import command
from phalanx.cli.forms import forms, has_option
from phalanx.cli.output import Saved

OPTIONS = """
source PLAN.json|JOB.toml: A plan, a run's folder or a job file; without one, give --strategy.
--axis AXIS: Colour the groups of this axis; by default the innermost.
"""


@command
def of_nodes(
    output: Saved,
    source: Path | None = None,
    strategy: str | None = None,
    cluster: str | None = None,
    model: str | None = None,
    axis: str | None = None,
) -> None:
    """Show which rank is on which GPU, the groups of every axis, and over which links each group talks; with a model,
    the layers of each pipeline rank."""
    from phalanx.answers.mesh import placement, rank_map

    output.show(rank_map(placement(source, strategy, cluster, model), axis))


@command
def of_cube(
    output: Saved,
    source: Path | None = None,
    strategy: str | None = None,
    cluster: str | None = None,
    axis: str | None = None,
) -> None:
    """Draw the three largest axes as a cube: in the terminal, its slices."""
    from phalanx.answers.mesh import placement, rank_map

    output.show(rank_map(placement(source, strategy, cluster), axis), cube=True)


@command
def of_groups(
    axis: str, output: Saved, source: Path | None = None, strategy: str | None = None, cluster: str | None = None
) -> None:
    """List all groups of an axis, and the links over which each talks.

    --axis AXIS: Axis, such as tp, ep or dp_shard+cp.
    """
    from phalanx.answers.mesh import mesh_groups, placement

    output.show(mesh_groups(placement(source, strategy, cluster), axis))


@command
def of_rank(
    rank: int,
    output: Saved,
    source: Path | None = None,
    strategy: str | None = None,
    cluster: str | None = None,
    axis: str | None = None,
) -> None:
    """Show where a rank is, and the groups that it is in; a --save outlines them.

    --rank: Rank.
    """
    from phalanx.answers.mesh import placement, rank_place

    output.show(rank_place(placement(source, strategy, cluster), rank, axis))


mesh = forms(
    "Show which rank is on which GPU, the groups of every axis, and over which links each group talks.",
    lambda words: "rank" if has_option(words, "--rank") else "nodes",
    default="nodes",
    nodes=of_nodes,
    cube=of_cube,
    groups=of_groups,
    rank=of_rank,
)
