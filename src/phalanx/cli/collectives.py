"""`phalanx collectives`: show algorithms step by step, prove them, compare them."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.options import Csv, Json, Plot
from phalanx.cli.terminal import (
    FAILED,
    announce,
    console,
    exit_on_error,
    print_json,
    require_drawing,
)

collectives = typer.Typer(no_args_is_help=True, help="Show, prove and compare algorithms of collective operations.")
_MOST_PROVED = 33
Operation = Annotated[
    str, typer.Option("--op", help="Operation: all_reduce, all_gather, reduce_scatter, broadcast, ...")
]


@collectives.command("show")
def collectives_show(
    algorithm: Annotated[
        str | None,
        typer.Argument(help="Algorithm: ring, rabenseifner, binomial, ...; none with --as.", show_default=False),
    ] = None,
    op: Operation = "all_reduce",
    ranks: Annotated[
        int, typer.Option(help="Number of ranks; at most 26, because contributions are drawn as letters.")
    ] = 4,
    root: Annotated[int, typer.Option(help="Root rank of a broadcast, reduce, scatter or gather.")] = 0,
    composition: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="OP[:ALGORITHM]+OP[:ALGORITHM]|dual[:ALGORITHM]",
            help="Compose it of others, such as reduce_scatter+all_gather, or turn its dual backwards.",
        ),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Step through an algorithm: which rank sends which chunk to which, and what each rank then holds."""
    from phalanx.schedule.collectives.compositions import composed
    from phalanx.schedule.collectives.registry import ALGORITHMS, build, two_tiers
    from phalanx.spec.errors import InputError, nearest

    with exit_on_error():
        from phalanx.answers.collectives import proof_of
        from phalanx.cli.output import show_view
        from phalanx.report.collective_proof import view
        from phalanx.report.collectives import MOST_DRAWN, rounds, steps
        from phalanx.report.view import View

        require_drawing(plot)
        if ranks > MOST_DRAWN:
            raise InputError("--ranks", ranks, "is too many to draw", f"use at most {MOST_DRAWN}")
        if (algorithm is None) == (composition is None):
            known = nearest(op, ALGORITHMS) if op not in ALGORITHMS else f"{op} has {', '.join(ALGORITHMS[op])}"
            raise InputError("algorithm", algorithm, "give an algorithm, or --as", known)
        if composition is not None:
            if ranks < 1:
                raise InputError("--ranks", ranks, "must be at least 1")
            schedule = composed(op, composition, ranks, ranks, root)
        else:
            schedule = build(op, str(algorithm), ranks, ranks, root, tiers=two_tiers(ranks))
        if plot is not None:
            from phalanx.report.gallery.collectives import rounds as drawn
            from phalanx.report.pictures.files import write

            write([drawn(schedule)], plot)
            announce(f"wrote {plot}")
        if as_json:
            name = composition or algorithm
            print_json({"op": op, "algorithm": name, "ranks": ranks, "rounds": list(rounds(schedule))})
            return
        show_view(View([*steps(schedule), *view(proof_of(schedule)).parts]))


@collectives.command("prove")
def collectives_prove(
    max_ranks: Annotated[int, typer.Option(help="Prove for every world size from 1 to this.")] = _MOST_PROVED,
    as_json: Json = False,
) -> None:
    """Prove every algorithm: each rank ends with each contribution exactly once, and nothing deadlocks."""
    from phalanx.progress import in_progress
    from phalanx.schedule.collectives.prove_all import count, sweep
    from phalanx.spec.errors import InputError

    with exit_on_error():
        if max_ranks < 1:
            raise InputError("--max-ranks", max_ranks, "must be at least 1")
        if max_ranks > _MOST_PROVED:
            reason = "takes minutes: an algorithm that holds for 1 to 33 ranks has no new case beyond"
            raise InputError("--max-ranks", max_ranks, reason, f"use at most {_MOST_PROVED}")
        results = list(in_progress(sweep(max_ranks), "schedules proved", announce, count(max_ranks)))
        refused = [line for line in results if line is not None]
        if as_json:
            print_json({"schedules": len(results), "refused": refused, "passed": not refused})
        else:
            for line in refused:
                print(line)
            print(f"{len(results) - len(refused)} of {len(results)} schedules proved, 1 to {max_ranks} ranks")
        if refused:
            raise typer.Exit(FAILED)


@collectives.command("reduce")
def collectives_reduce(
    algorithm: Annotated[str, typer.Argument(help="Algorithm: ring, rabenseifner, binomial, ...")],
    function: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="NAME|MODULE:FUNCTION",
            help="sum, product, min, max, gcd, and, or, xor; or a function of two tensors, of your own.",
        ),
    ],
    op: Operation = "all_reduce",
    ranks: Annotated[int, typer.Option(help="Number of local ranks, 1 to 8.")] = 3,
    as_json: Json = False,
) -> None:
    """Prove an algorithm for a reduction of your own, and run it: on local ranks, against one process."""
    from phalanx.schedule.errors import Unproved

    with exit_on_error():
        from phalanx.answers.own_reduction import run
        from phalanx.schedule.collectives.registry import two_tiers

        try:
            result = run(op, algorithm, function, ranks, two_tiers(ranks))
        except Unproved as error:
            print(f"{function} under {algorithm} {op}: {error}")
            raise typer.Exit(FAILED) from None
        algebra = "associative and commutative" if result.needs.commutative else "associative"
        if as_json:
            print_json({"needs": algebra, "elements": result.elements, "wrong": result.wrong})
        else:
            order = ", ".join(map(str, result.needs.example))
            print(f"{algorithm} {op} needs a function that is {algebra}: it combines ranks in the order {order}")
            print(f"{function} has that on drawn integers (a search for a counterexample, no proof)")
            print(f"run on {ranks} ranks: {result.wrong:,} of {result.elements:,} elements differ from one process")
        if result.wrong:
            raise typer.Exit(FAILED)


@collectives.command("bound")
def collectives_bound(
    ranks: Annotated[int, typer.Option(help="Number of ranks, 2 to 5.")] = 4,
    as_json: Json = False,
) -> None:
    """Search everything that a few ranks can do for the least that an all-reduce must send."""
    from phalanx.schedule.collectives.gossip import fewest_messages

    with exit_on_error():
        bound = fewest_messages(ranks)
        if as_json:
            print_json({"ranks": ranks, "messages": bound.messages, "sent_share": bound.sent_share})
            return
        least = bound.messages
        out = console()
        out.print(
            f"{least} messages = 2 (P-1) are the fewest that leave the sum of an element on all {ranks} ranks: with "
            f"fewer, {bound.states:,} states can be reached, and none has it\n"
            "why: until a first rank has the whole sum, each of the P-1 others has sent at least once; after that "
            "each of them has yet to receive it\n"
            f"so {ranks} ranks send {least} n bytes in all, and some rank at least 2 n (P-1)/P = "
            f"{bound.sent_share:g} n; a ring sends just that",
            highlight=False,
            soft_wrap=True,
        )


@collectives.command("table")
def collectives_table(
    op: Operation = "all_reduce",
    size: Annotated[
        str, typer.Option("--bytes", help="Size of the buffer, such as 100MB or 64KiB; ignored for a barrier.")
    ] = "100MB",
    ranks: Annotated[int, typer.Option(help="Number of ranks in the group.")] = 8,
    cluster: Annotated[
        str,
        typer.Option(help="A preset, a cluster's TOML file, or local: ranks of this machine, as measured."),
    ] = "dgx-h100",
    symbols: Annotated[
        bool, typer.Option("--symbols", help="Show the formulas of all algorithms instead, in symbols.")
    ] = False,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Compare all algorithms of an operation on a cluster: rounds, bytes, time, and how far from the lower bound."""
    from dataclasses import asdict
    from pathlib import Path

    with exit_on_error():
        from phalanx.planning import lookup as question
        from phalanx.planning.tables.collectives import compare
        from phalanx.spec.byte_sizes import parse_bytes
        from phalanx.spec.cluster import presets as clusters
        from phalanx.spec.errors import InputError
        from phalanx.spec.files.cluster_toml import cluster_from_toml

        require_drawing(plot)
        if plot is not None and (symbols or cluster == "local" or op == "barrier"):
            raise InputError(
                "--plot", str(plot), "draws times over the size of a buffer", "name a preset and no barrier"
            )
        if symbols:
            from phalanx.answers.tables import Tables
            from phalanx.cli.output import Output
            from phalanx.planning.tables.collectives import formulas

            Output(as_json, as_csv).show(Tables(None, (formulas(),)))
            return
        if cluster == "local":
            _show_measured(op, int(parse_bytes(size)), ranks, as_json)
            return
        if cluster.endswith(".toml"):
            spec = cluster_from_toml(Path(cluster))
        else:
            question.require_counts(("--ranks", ranks))
            spec = clusters.preset(cluster, nodes=-(-ranks // clusters.preset(cluster, 1).ranks_per_node))
        table = compare(op, parse_bytes(size), ranks, spec)
        if plot is not None:
            from phalanx.report.gallery.collectives import algorithms_over_size
            from phalanx.report.pictures.files import write

            write([algorithms_over_size(op, ranks, cluster)], plot)
            announce(f"wrote {plot}")
        if as_json:
            print_json(asdict(table))
            return

        from phalanx.cli.output import show_view
        from phalanx.report.collectives import comparison, crossovers, winners
        from phalanx.report.view import View

        title = op if op == "barrier" else f"{op} of {size}"
        fastest = ["fastest, by size of the buffer:", *(f"  {line}" for line in winners(table))]
        drawn = comparison(table, f"{title} over {ranks} ranks of {spec.name}")
        show_view(View([drawn, *(fastest if table.winners else []), *crossovers(table)]))


def _show_measured(op: str, size: int, ranks: int, as_json: bool) -> None:
    """Show what was measured between local ranks: every transport and algorithm, and which one serves which size."""
    from phalanx.answers import measure
    from phalanx.cli.output import show_view
    from phalanx.report.collectives import choices, measured
    from phalanx.report.view import View

    fits, chosen = measure.local_collectives(op, ranks, announce)
    if as_json:
        from dataclasses import asdict

        rows = [{"way": fit.way, "seconds": float(fit.seconds(size)), **asdict(fit)} for fit in fits]
        print_json({"rows": rows, "choices": [asdict(c) for c in chosen]})
        return

    table = measured(fits, size, f"{op} of {size:,} bytes over {ranks} ranks of this machine")
    taken = ("auto takes, by size of the buffer:", *(f"  {line}" for line in choices(chosen)))
    show_view(View([table, *taken]))
