"""`phalanx collectives`: show algorithms step by step, prove them, compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display
from phalanx.cli.terminal import FAILED, announce

OPTIONS = """
--op: Operation: all_reduce, all_gather, reduce_scatter, broadcast, ...
"""


collectives = forms(
    "Show, prove and compare algorithms of collective operations.",
    {
        "show": Form(f"{__name__}:show", "Step through an algorithm, and prove it."),
        "prove": Form(f"{__name__}:prove", "Prove every algorithm for every number of ranks."),
        "reduce": Form(f"{__name__}:reduce", "Prove an algorithm for a reduction of your own, and run it."),
        "bound": Form(f"{__name__}:bound", "Search for the least that an all-reduce must send."),
        "table": Form(f"{__name__}:table", "Compare all algorithms of an operation on a cluster."),
        "formulas": Form(f"{__name__}:formulas", "The formulas of all algorithms, in symbols."),
    },
)


@command
def show(
    output: Annotated[Display, "json", "save"],
    algorithm: str | None = None,
    op: str = "all_reduce",
    ranks: int = 4,
    root: int = 0,
    composition: str | None = None,
) -> None:
    """Step through an algorithm: which rank sends which chunk to which, and what each rank then holds.

    algorithm: Algorithm: ring, rabenseifner, binomial, ...; none with --as.
    --ranks: Number of ranks; at most 26, because contributions are drawn as letters.
    --root: Root rank of a broadcast, reduce, scatter or gather.
    composition --as OP[:ALGORITHM]+OP[:ALGORITHM]|dual[:ALGORITHM]: Compose it of others, such as
        reduce_scatter+all_gather, or turn its dual backwards.
    """
    from phalanx.answers.collectives import show as follow
    from phalanx.schedule.collectives.registry import ALGORITHMS
    from phalanx.spec.errors import InputError, nearest

    if (algorithm is None) == (composition is None):
        known = nearest(op, ALGORITHMS) if op not in ALGORITHMS else f"{op} has {', '.join(ALGORITHMS[op])}"
        raise InputError("algorithm", algorithm, "give an algorithm, or --as", known)
    output.show(follow(op, algorithm, ranks, root, composition=composition))


@command
def prove(output: Annotated[Display, "json"], max_ranks: int = 33) -> None:
    """Prove every algorithm: each rank ends with each contribution exactly once, and nothing deadlocks.

    --max-ranks: Prove for every world size from 1 to this.
    """
    from phalanx.answers.collectives import prove_all

    answer = prove_all(max_ranks, announce)
    output.show(answer)
    if not answer.passed:
        raise typer.Exit(FAILED)


@command
def reduce(
    output: Annotated[Display, "json"], algorithm: str, function: str, op: str = "all_reduce", ranks: int = 3
) -> None:
    """Prove an algorithm for a reduction of your own, and run it: on local ranks, against one process.

    algorithm: Algorithm: ring, rabenseifner, binomial, ...
    function --with NAME|MODULE:FUNCTION: sum, product, min, max, gcd, and, or, xor; or a function of two tensors, of
        your own.
    --ranks: Number of local ranks, 1 to 8.
    """
    from phalanx.answers.own_reduction import run
    from phalanx.spec.errors import Unproved

    try:
        answer = run(op, algorithm, function, ranks)
    except Unproved as error:
        print(f"{function} under {algorithm} {op}: {error}")
        raise typer.Exit(FAILED) from None
    output.show(answer)
    if answer.wrong:
        raise typer.Exit(FAILED)


@command
def bound(output: Annotated[Display, "json"], ranks: int = 4) -> None:
    """Search everything that a few ranks can do for the least that an all-reduce must send.

    --ranks: Number of ranks, 2 to 5.
    """
    from phalanx.answers.collectives import bound as search

    output.show(search(ranks))


@command
def table(
    output: Annotated[Display, "json", "save"],
    op: str = "all_reduce",
    size: str = "100MB",
    ranks: int = 8,
    cluster: str = "dgx-h100",
) -> None:
    """Compare all algorithms of an operation on a cluster: rounds, bytes, time, and how far from the lower bound.

    size --bytes: Size of the buffer, such as 100MB or 64KiB; ignored for a barrier.
    --ranks: Number of ranks in the group.
    --cluster: A preset, a cluster's TOML file, or local: ranks of this machine, as measured.
    """
    from phalanx.answers.collectives import collectives as compare
    from phalanx.answers.collectives import measured
    from phalanx.spec.errors import InputError
    from phalanx.spec.files.cluster_toml import cluster_from_toml

    drawn = [str(file) for file in output.save or () if file.suffix in (".svg", ".png")]
    if drawn and (cluster == "local" or op == "barrier"):
        raise InputError("--save", drawn[0], "draws times over the size of a buffer", "name a preset and no barrier")
    if cluster == "local":
        output.show(measured(op, size, ranks, announce))
        return
    output.show(compare(op, size, ranks, cluster_from_toml(Path(cluster)) if cluster.endswith(".toml") else cluster))


@command
def formulas(output: Annotated[Display, "json", "save"]) -> None:
    """Show the formulas of all algorithms, in symbols."""
    from phalanx.answers.tables import Tables
    from phalanx.planning.tables.collectives import formulas as sheet

    output.show(Tables(None, (sheet(),)))
