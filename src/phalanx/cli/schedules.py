"""`phalanx collectives` and `phalanx pipeline`: schedules drawn, proved and compared."""

from pathlib import Path

import typer

from phalanx.cli.command import command
from phalanx.cli.forms import forms
from phalanx.cli.output import Printed, Saved
from phalanx.cli.terminal import FAILED, announce

OPTIONS = """
--micro-batches: Micro-batches a step.
--virtual: Chunks per rank of interleaved; default 2.
--costs: Times of a rank's forward passes F, input gradients I, weight gradients W.
--transfer: Time of a message, in the unit of --costs.
--ranks: Number of pipeline ranks.
--op: Operation: all_reduce, all_gather, reduce_scatter, broadcast, ...
"""


@command
def collective_show(
    output: Saved,
    algorithm: str | None = None,
    op: str = "all_reduce",
    ranks: int | None = None,
    root: int = 0,
    node: int | None = None,
    composition: str | None = None,
) -> None:
    """Step through an algorithm: which rank sends which chunk to which, and what each rank then holds.

    algorithm: Algorithm: ring, rabenseifner, binomial, ..., or a JSON file; none with --as.
    --ranks: Number of ranks, at most 26: contributions are drawn as letters. By default 4, or the file's.
    --root: Root rank of a broadcast, reduce, scatter or gather.
    --node: Ranks of a node, for hierarchical; by default the fewest.
    composition --as OP[:ALGORITHM]+OP[:ALGORITHM]|dual[:ALGORITHM]: Compose it of others, such as
        reduce_scatter+all_gather, or turn its dual backwards.
    """
    from phalanx.answers.schedules.collectives import show as follow
    from phalanx.schedule.collectives.algorithm_file import ranks_of
    from phalanx.schedule.collectives.registry import ALGORITHMS
    from phalanx.spec.errors import InputError, nearest

    if (algorithm is None) == (composition is None):
        known = nearest(op, ALGORITHMS) if op not in ALGORITHMS else f"{op} has {', '.join(ALGORITHMS[op])}"
        raise InputError("algorithm", algorithm, "give an algorithm, or --as", known)
    ranks = ranks_of(algorithm, ranks, 4)
    output.show(follow(op, algorithm, ranks, root, node=node, composition=composition))


@command
def collective_prove(output: Printed, file: str | None = None, max_ranks: int = 33) -> None:
    """Prove every algorithm: each rank ends with each contribution exactly once, and nothing deadlocks.

    file: JSON file with an algorithm, to be proved instead.
    --max-ranks: Prove for every world size from 1 to this.
    """
    from phalanx.answers.schedules.collectives import proof_of, prove_all
    from phalanx.schedule.collectives.registry import schedule_of_file
    from phalanx.spec.errors import Unproved

    if file is not None:
        try:
            output.show(proof_of(schedule_of_file(file)))
        except Unproved as error:
            print(f"{file} is not proved: {error}")
            raise typer.Exit(FAILED) from None
        return
    output.show(prove_all(max_ranks, announce))


@command
def collective_reduce(
    output: Printed, algorithm: str, function: str, op: str = "all_reduce", ranks: int | None = None
) -> None:
    """Prove an algorithm for a reduction of your own, and run it: on local ranks, against one process.

    algorithm: Algorithm: ring, rabenseifner, binomial, ..., or a JSON file.
    function --with NAME|MODULE:FUNCTION: sum, product, min, max, gcd, and, or, xor; or a function of two tensors, of
        your own.
    --ranks: Number of local ranks, 1 to 8; by default 3, or the file's.
    """
    from phalanx.answers.schedules.own_reduction import run
    from phalanx.schedule.collectives.algorithm_file import ranks_of
    from phalanx.spec.errors import Unproved

    try:
        answer = run(op, algorithm, function, ranks_of(algorithm, ranks, 3))
    except Unproved as error:
        print(f"{function} under {algorithm} {op}: {error}")
        raise typer.Exit(FAILED) from None
    output.show(answer, failed=bool(answer.wrong))


@command
def collective_bound(output: Printed, ranks: int = 4) -> None:
    """Search everything that a few ranks can do for the least that an all-reduce must send.

    --ranks: Number of ranks, 2 to 5.
    """
    from phalanx.answers.schedules.collectives import bound as search

    output.show(search(ranks))


@command
def collective_table(
    output: Saved,
    files: list[str] | None = None,
    op: str = "all_reduce",
    size: str = "100MB",
    ranks: int | None = None,
    cluster: str | None = None,
    alpha: float | None = None,
    rate: float | None = None,
) -> None:
    """Compare all algorithms of an operation on a cluster: rounds, bytes, time, and how far from the lower bound.

    Give --alpha and --rate instead of a cluster for ranks that one kind of link joins.

    files: JSON files with an algorithm of the operation, as `collectives show --json` prints one.
    size --bytes: Size of the buffer, such as 100MB or 64KiB; ignored for a barrier.
    --ranks: Number of ranks in the group; by default 8, or the first file's.
    --cluster: A preset, a cluster's TOML file, or local: ranks of this machine, as measured; by default dgx-h100.
    --alpha: Latency of a message, in µs.
    --rate: Bandwidth of a rank in one direction, in GB/s.
    """
    from phalanx.answers.schedules.collectives import collectives as compare
    from phalanx.answers.schedules.collectives import measure_collective, on_links
    from phalanx.schedule.collectives.algorithm_file import ranks_of
    from phalanx.spec.errors import InputError
    from phalanx.spec.files.cluster_toml import cluster_from_toml

    ranks = ranks_of(files[0] if files else None, ranks, 8)
    drawn = [str(file) for file in output.save or () if file.suffix in (".svg", ".png")]
    if drawn and (cluster == "local" or op == "barrier"):
        raise InputError("--save", drawn[0], "draws times over the size of a buffer", "name a preset and no barrier")
    if cluster == "local" and files:
        raise InputError("files", files[0], "is measured by no command", "name a cluster, which prices it")
    if cluster == "local":
        output.show(measure_collective(op, size, ranks, announce))
        return
    if alpha is not None or rate is not None:
        if cluster is not None:
            raise InputError("cluster", cluster, "has links of its own", "leave it out, or --alpha and --rate")
        output.show(on_links(op, size, ranks, alpha, rate, files or ()))
        return
    cluster = cluster or "dgx-h100"
    on = cluster_from_toml(Path(cluster)) if cluster.endswith(".toml") else cluster
    output.show(compare(op, size, ranks, on, files or ()))


@command
def collective_formulas(output: Saved) -> None:
    """Show the formulas of all algorithms, in symbols."""
    from phalanx.answers.tables import Tables
    from phalanx.planning.tables.collectives import formulas as sheet

    output.show(Tables(None, (sheet(),)))


@command
def pipeline_show(
    output: Saved,
    names: list[str],
    ranks: int = 4,
    micro_batches: int = 8,
    virtual: int | None = None,
    costs: str = "1,1,1",
    transfer: float = 0.0,
) -> None:
    """Draw schedules over time, on one scale, with their bubble and live activations.

    Of a run, draw its traced step as measured and as predicted. A drawing that is wider than the terminal, or than
    COLUMNS says, goes on in panels.

    names: Schedules (1f1b, gpipe, zb-v, ...), CSV files, or folders of runs.
    """
    from phalanx.answers.schedules.pipeline import draw

    output.show(draw(names, ranks, micro_batches, virtual, costs, transfer))


@command
def pipeline_table(
    output: Printed,
    names: list[str] | None = None,
    ranks: int = 4,
    micro_batches: int = 8,
    virtual: int | None = None,
    costs: str = "1,1,1",
    transfer: float = 0.0,
) -> None:
    """Compare the memory and the bubble of schedules.

    names: Schedules or CSV files; by default all.
    """
    from phalanx.answers.schedules.pipeline import compare

    output.show(compare(ranks, micro_batches, virtual, costs, transfer, names or ()))


@command
def pipeline_prove(
    output: Printed,
    names: list[str] | None = None,
    ranks: int = 4,
    micro_batches: int = 8,
    virtual: int | None = None,
    slots: bool = False,
) -> None:
    """Prove schedules: every pass runs once and after what it needs, with no deadlock even if sends block.

    names: Schedules or CSV files; by default all.
    --slots: Read the cells of CSV files as time slots: no pass may come before what it needs.
    """
    from phalanx.answers.schedules.pipeline import prove as prove_all

    output.show(prove_all(names or (), ranks, micro_batches, virtual, slots))


@command
def pipeline_csv(
    name: str, ranks: int = 4, micro_batches: int = 8, virtual: int | None = None, sends: bool = False
) -> None:
    """Print a schedule as the CSV that torch.distributed.pipelining and torchtitan load: a line per rank.

    name: Schedule: 1f1b, gpipe, interleaved, zb-v, ...
    --sends: Include sends and receives.
    """
    from phalanx.answers.schedules.pipeline import schedule_named
    from phalanx.schedule.pipeline.proof import prove as prove_one
    from phalanx.schedule.pipeline.simulate import insert_sends, strip_sends
    from phalanx.schedule.pipeline.torch_csv import to_csv

    schedule = schedule_named(name, ranks, micro_batches, virtual)
    prove_one(schedule)
    bare = strip_sends(schedule)
    print(to_csv(insert_sends(bare) if sends else bare), end="")


collectives = forms(
    "Show, prove and compare algorithms of collective operations.",
    show=collective_show,
    prove=collective_prove,
    reduce=collective_reduce,
    bound=collective_bound,
    table=collective_table,
    formulas=collective_formulas,
)
pipeline = forms(
    "Draw, compare and prove pipeline schedules, or write them as CSV.",
    show=pipeline_show,
    table=pipeline_table,
    prove=pipeline_prove,
    csv=pipeline_csv,
)
