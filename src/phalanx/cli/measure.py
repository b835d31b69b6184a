"""`phalanx measure`: measure this machine, or under torchrun the whole cluster; or read what nccl-tests measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display
from phalanx.cli.terminal import announce, require_torch, require_writable
from phalanx.cli.unread import require_only

if TYPE_CHECKING:
    from phalanx.spec.cluster.spec import ClusterSpec

OPTIONS = """
--out FILE.toml: Write the measured cluster to this file; under torchrun the default is cluster.toml.
"""


measure = forms(
    "Measure kernel rates, links and collectives of this machine, or under torchrun of all hosts.",
    {
        "machine": Form(f"{__name__}:of_machine", "Kernels, links and collectives, here or under torchrun."),
        "nccl-tests": Form(f"{__name__}:of_nccl_tests", "Measure nothing: read the output of nccl-tests."),
    },
    lambda _: "machine",
    default="machine",
)


@command
def of_machine(
    line: typer.Context,
    output: Annotated[Display, "json", "save"],
    ranks: int | None = None,
    dtype: str = "float32",
    threads: int = 1,
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Measure kernel rates, links and collectives of this machine, or under torchrun of all hosts.

    `train` and `plan` use the result: on this machine by itself, elsewhere as cluster.file.

    --ranks: Number of local ranks; by default one per GPU or core.
    --dtype: Type that kernels compute in: float32, bfloat16, ...
    --threads: Number of threads per rank.
    --quick: Measure this machine at fewer sizes in fewer rounds: in seconds, not a minute, and less exactly.
    """
    from phalanx.answers.measure import measure as measure_machine
    from phalanx.answers.measure import measure_ranks

    require_writable("--out", out)
    require_torch()
    from phalanx.measure.steal_time import noted
    from phalanx.runtime.process.environment import external

    world = external()
    if world is None:
        _show(measure_machine(ranks, dtype, threads, quick, announce), out, output)
        return
    require_only(line, "dtype", "threads", "out", reason="is for this machine alone, not under torchrun")
    # The other ranks are no children of this one, and count as others.
    with noted(announce if world.rank == 0 else lambda _: None, threads):
        measured = measure_ranks(world, dtype, threads)
    if measured is None:
        sys.stdout.flush()
        return
    _show(measured, out or Path("cluster.toml"), output)


@command
def of_nccl_tests(
    files: list[Path],
    output: Annotated[Display, "json", "save"],
    preset: str = "dgx-h100",
    op: str = "",
    out: Path | None = None,
) -> None:
    """Read what nccl-tests measured on a cluster: its collectives, fitted, with all else from a preset.

    files FILE...: Display of nccl-tests, a file a collective.
    --preset: Cluster preset that the tests were run on.
    --op: Operation that was measured, for files that do not name it.
    """
    from phalanx.answers.measure import from_nccl_tests

    require_writable("--out", out)
    _show(from_nccl_tests(files, preset, op), out, output)


def _show(cluster: ClusterSpec, out: Path | None, output: Display) -> None:
    """Write a measured cluster to its file, and show it."""
    from phalanx.answers.measure import Measurement

    if out is not None:
        from phalanx.spec.files.cluster_toml import to_toml

        out.write_text(to_toml(cluster, f"{cluster.name}, as measured; [cluster] file = {str(out)!r} uses it"))
        announce(f"wrote {out}")
    output.show(Measurement(cluster))
