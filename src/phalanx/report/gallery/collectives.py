"""Pictures of collectives: round by round, their cost over size, the root as a bottleneck, their family."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from phalanx.cost.collectives.closed_form import best_segments, closed_form
from phalanx.cost.collectives.critical_path import costs
from phalanx.planning.lookup import cluster_named, require_counts
from phalanx.report.gallery.round_words import cells, sends
from phalanx.report.pictures.figure import (
    Bar,
    Bars,
    Lines,
    Mark,
    Node,
    Picture,
    PlotAxis,
    Rounds,
    RoundState,
    RuleLine,
    Series,
    Tree,
)
from phalanx.report.pictures.numbers import short
from phalanx.schedule.collectives.compositions import compose_operations
from phalanx.schedule.collectives.ir import Schedule, chain
from phalanx.schedule.collectives.proof import prove, run
from phalanx.schedule.collectives.registry import ALGORITHMS, COMPOSED, DUALS, build, two_tiers
from phalanx.spec.cluster.presets import PRESETS, preset
from phalanx.spec.errors import InputError

MOST_DRAWN = 8
"""The most ranks of a collective that is drawn."""


def rounds(schedule: Schedule, node: int = 0) -> Picture:
    """Draw a schedule round by round, on nodes of `node` ranks. Raises InputError for too many ranks."""
    if schedule.ranks > MOST_DRAWN:
        raise InputError("save", None, f"draws at most {MOST_DRAWN} ranks", "leave it out, or ask for fewer ranks")
    cost = prove(schedule)
    most = cost.sent / max(1, schedule.buffer)
    column = "block" if schedule.op == "all_to_all" else "chunk"
    letters = (
        "A row is a rank, a column a place in its buffer; B2 is what rank 1 has for rank 2: rows become columns."
        if schedule.op == "all_to_all"
        else "A row is a rank, a column a chunk; A is rank 0's contribution, B rank 1's."
    )
    return Picture(
        f"{schedule.op} by {schedule.algorithm} over {schedule.ranks} ranks",
        (Rounds(tuple(_states(schedule)), column, node),),
        f"`phalanx collectives show`: the schedule that is proved, priced and run; {cost.messages} messages, at most "
        f"{most:.4g} of the buffer sent by a rank",
        f"{letters} Outlined: what came in this round."
        + (f" Nodes of {node} ranks; red: the slow links between them." if node else ""),
    )


def _states(schedule: Schedule) -> list[RoundState]:
    """Return the chunks of each rank at the start and after every round, and the messages of the round."""
    symbolic = run(schedule)
    states: list[RoundState] = []
    needed = symbolic.positions(schedule.start).sum(axis=0)
    for number, counts in symbolic.states():
        words = cells(symbolic, counts, number)
        share = (counts.sum(axis=2) / needed).tolist()
        if schedule.op == "all_to_all":
            share = [[float(word != ".") for word in row] for row in words]
        before = states[-1].cells if states else words
        changed = [[a != b for a, b in zip(*rows, strict=True)] for rows in zip(words, before, strict=True)]
        head = "start" if number == 0 else f"round {number} of {schedule.rounds}"
        states.append(RoundState(head, sends(symbolic, number - 1), words, share, changed))
    return states


def collective(named: str) -> Callable[[int], Picture]:
    """Return a function that draws a collective over a number of ranks; `named`: such as `all_reduce ring`."""
    op, algorithm = named.split()

    def draw(ranks: int = 4) -> Picture:
        require_counts(("ranks", ranks))
        if ranks > MOST_DRAWN:
            raise InputError("ranks", ranks, "is too many to draw", f"use at most {MOST_DRAWN}")
        tiers = two_tiers(ranks, ranks // 2 if ranks % 2 == 0 else None)
        node = tiers[0] if algorithm == "hierarchical" else 0
        return rounds(build(op, algorithm, ranks, ranks, tiers=tiers), node)

    return draw


def message_cost() -> Picture:
    """Draw the time of a message over its size for links of several presets, and n* = α/β of all tiers."""
    sizes = [2.0**k for k in range(8, 31)]
    series, marks, bars = [], [], []
    for name in PRESETS:
        spec = preset(name, 32)
        for tier in spec.tiers:
            beta = 1 / tier.bandwidth_bytes_per_s_per_gpu_per_direction
            n = tier.latency_s / beta
            bars.append(Bar(f"{name} {tier.name}", (("", float(np.log2(n / 1024))),), f"n* {short(n, 'bytes')}"))
    chosen = [("dgx-h100", 0), ("dgx-h100", 1), ("ethernet-h100", 1), ("pcie-a100", 0), ("sites-h100", 2)]
    for j, (name, i) in enumerate(chosen):
        tier = preset(name, 32).tiers[i]
        alpha, beta = tier.latency_s, 1 / tier.bandwidth_bytes_per_s_per_gpu_per_direction
        series.append(Series(f"{name}: {tier.name}", [(n, alpha + n * beta) for n in sizes], colour=j))
        n = alpha / beta
        marks.append(Mark(n, 2 * alpha, f"n* {short(n, 'bytes')}", j))
    curves = Lines(
        PlotAxis("bytes of a message", "bytes", log=True, base=2**5, low=256, high=2.0**30),
        PlotAxis("seconds of a message: latency + bytes / bandwidth", "s", log=True),
        tuple(series),
        tuple(marks),
        height=340,
    )
    return Picture(
        "Cost of a message over its size: latency until n* = alpha/beta, then bandwidth",
        (
            curves,
            Bars(
                "n* = alpha/beta, on a logarithmic axis",
                tuple(bars),
                head="The crossover of each preset's tiers",
                ticks=(("1 KiB", 0), ("32 KiB", 5), ("1 MiB", 10), ("32 MiB", 15)),
            ),
        ),
        "`phalanx tables clusters` (bandwidths of datasheets in one direction, latencies estimated), n* as `phalanx "
        "collectives table` prints it",
        "At the dot latency and bytes cost the same; messages far smaller waste the link.",
    )


def algorithms(ranks: int = 64, cluster: str = "dgx-h100") -> Picture:
    """Draw all-reduces over size."""
    return algorithms_over_size("all_reduce", ranks, cluster)


def algorithms_over_size(op: str, ranks: int, cluster: str) -> Picture:
    """Draw the time of all algorithms with a published formula over the size, on a cluster's slowest tier in use."""
    spec = cluster_named(cluster)(ranks)
    links = costs(spec)
    tier = next((i for i, t in enumerate(spec.tiers) if t.ranks >= ranks), len(spec.tiers) - 1)
    _, alpha, beta = links.tiers[tier]
    sizes = [2.0**k for k in range(8, 31)]
    curves: dict[str, list[tuple[float, float]]] = {}
    for algorithm in ALGORITHMS[op]:
        points = []
        for n in sizes:
            segments = best_segments(op, algorithm, ranks, n, alpha, beta)
            seconds = closed_form(op, algorithm, ranks, n, alpha, beta, links.gamma_s_per_byte, segments)
            if seconds:
                points.append((n, seconds))
        if points:
            curves[algorithm] = points
    if not curves:
        raise InputError("save", None, f"no algorithm of {op} has a formula for {ranks} ranks", "leave it out")
    best = [(n, min(curves, key=lambda a: dict(curves[a]).get(n, float("inf")))) for n in sizes]
    changes = [
        (_crossing(curves[last], curves[algorithm], before, n), algorithm)
        for (before, last), (n, algorithm) in pairwise(best)
        if algorithm != last
    ]
    rules = [RuleLine("x", n, f"{algorithm} from here") for n, algorithm in changes]
    panel = Lines(
        PlotAxis("bytes of the buffer", "bytes", log=True, base=2**5, low=256, high=2.0**30),
        PlotAxis(f"seconds of {op}", "s", log=True),
        tuple(Series(a, points, dashed=i > 5) for i, (a, points) in enumerate(curves.items())),
        rules=tuple(rules),
        height=340,
    )
    return Picture(
        f"{op} over {ranks} ranks of {spec.name}: the fastest algorithm by size",
        (panel,),
        f"`phalanx collectives table --op {op} --ranks {ranks} --cluster {cluster}`: published "
        f"formulas on {spec.tiers[tier].name} links",
        f"Smallest buffers: {best[0][1]}. n* = alpha/beta of these links is {short(alpha / beta, 'bytes')}.",
    )


def _crossing(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], low: float, high: float
) -> float:
    """Return the size between `low` and `high` at which two curves cross, as straight lines on logarithmic axes;
    `high` if one of them lacks a point at either end."""
    a, b = dict(one), dict(other)
    if low not in b or high not in a:
        return high
    ahead, behind = np.log(b[low] / a[low]), np.log(a[high] / b[high])
    return float(low * (high / low) ** (ahead / (ahead + behind)))


def root_bottleneck(ranks: int = 8) -> Picture:
    """Draw the bytes that each rank sends in an all-reduce through a root and around a ring, and how they grow."""
    if not 2 <= ranks <= 64:
        raise InputError("ranks", ranks, "cannot be drawn", "use 2 to 64")
    panels = []
    for algorithm in ("naive", "ring"):
        schedule = build("all_reduce", algorithm, ranks, ranks)
        received = np.bincount(schedule.destination, weights=schedule.length, minlength=ranks)
        shown = range(ranks) if ranks <= 12 else (*range(6), *range(ranks - 3, ranks))
        bars = [
            Bar(
                f"rank {r}",
                (("sent", schedule.sent[r] / ranks), ("received", received[r] / ranks)),
                f"{schedule.sent[r] / ranks:.4g} n + {received[r] / ranks:.4g} n"
                + (" (root)" if algorithm == "naive" and r == 0 else ""),
            )
            for r in shown
        ]
        what = "through a root: reduce, then broadcast" if algorithm == "naive" else "around a ring"
        head = f"all_reduce {what}; {schedule.rounds} rounds"
        panels.append(Bars("buffers of n bytes", tuple(bars), head=head, end=2.0 * (ranks - 1)))
    counts = (2, 4, 8, 16, 32, 64)
    curves = tuple(
        Series(label, [(float(p), float(build("all_reduce", a, p, p).sent.max()) / p) for p in counts], dots=True)
        for a, label in (("naive", "root"), ("ring", "ring: 2 (P-1)/P, never more than 2"))
    )
    grows = Lines(
        PlotAxis("ranks P", "count", log=True, base=2, low=2, high=64),
        PlotAxis("buffers that the busiest rank sends", "count", low=0),
        curves,
        head="How it grows",
        height=220,
    )
    return Picture(
        f"A root is a bottleneck: all-reduce of n bytes over {ranks} ranks",
        (*panels, grows),
        "`phalanx collectives show naive|ring`: the schedules that are proved and run",
        "The same scale in both: around a ring no rank carries what a root must.",
    )


def family() -> Picture:
    """Draw how collectives are made of each other, with their algorithms."""

    def node(op: str) -> Node:
        below = []
        for algorithm in ALGORITHMS[op]:
            if (op, algorithm) in COMPOSED:
                parts = " + ".join(f"{a} ({b})" for a, b in COMPOSED[op, algorithm])
                below.append(Node(f"{algorithm} = {parts}", leaf=True))
            elif (op, algorithm) in DUALS:
                other, name = DUALS[op, algorithm]
                below.append(Node(f"{algorithm} = {other} ({name}) backwards", leaf=True))
        plain = [a for a in ALGORITHMS[op] if (op, a) not in COMPOSED and (op, a) not in DUALS]
        if op == "all_reduce":
            for algorithm in tuple(plain):
                if halves := _halves(algorithm):
                    words = f"{algorithm} = reduce_scatter ({halves[0]}) + all_gather ({halves[1]})"
                    below.append(Node(words, leaf=True))
                    plain.remove(algorithm)
        if plain:
            below.append(Node("by its own rounds: " + ", ".join(plain), leaf=True))
        return Node(f"{op} ({_MPI[op]}): {_MEANING[op]}", tuple(below))

    groups = (
        ("one rank to all, and back", ("broadcast", "reduce", "scatter", "gather")),
        ("all to all", ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")),
        ("no data", ("barrier",)),
    )
    missing = set(ALGORITHMS) - {op for _, ops in groups for op in ops}
    assert not missing, missing
    root = Node("collectives", tuple(Node(name, tuple(node(op) for op in ops)) for name, ops in groups))
    return Picture(
        "The family of collectives: what each does, and of which others it is made",
        (
            Rounds(tuple(_before_and_after()), head="What each does, over three ranks", across=4),
            Rounds(tuple(_compositions()), head="Of which two some are made", across=3),
            Tree(root, "All algorithms"),
        ),
        "`phalanx collectives prove` proves every one of these; compositions by `phalanx collectives show --as`",
        "A row is a rank, A rank 0's contribution; of an all-to-all B2 is what rank 1 has for rank 2. Backwards: the "
        "dual, with time and direction reversed, and sums in place of copies.",
    )


_SHOWN = 3
"""Ranks in the tables of states before and after."""


def _before_and_after() -> Iterator[RoundState]:
    """Yield the first and the last state of every operation."""
    for op, names in ALGORITHMS.items():
        if op != "barrier":
            first, *_, last = _states(build(op, names[0], _SHOWN, _SHOWN))
            yield replace(first, head=f"{op}: before")
            yield replace(last, head="after", sends=(), changed=first.changed)


def _compositions() -> Iterator[RoundState]:
    """Yield the states of operations made of two others: before, after the first, and after the second."""
    for op, (one, other) in (
        ("all_reduce", ("reduce_scatter", "all_gather")),
        ("all_reduce", ("reduce", "broadcast")),
        ("all_gather", ("gather", "broadcast")),
        ("reduce_scatter", ("reduce", "scatter")),
    ):
        states = _states(compose_operations(op, f"{one}+{other}", _SHOWN, _SHOWN))
        middle = build(one, ALGORITHMS[one][0], _SHOWN, _SHOWN).rounds
        yield replace(states[0], head=f"{op}: before")
        for state, last in ((states[middle], one), (states[-1], other)):
            yield replace(state, head=f"after {last}", sends=(), changed=states[0].changed)


def _halves(algorithm: str, ranks: int = 8) -> tuple[str, str] | None:
    """Return the algorithms of reduce-scatter and all-gather whose messages, in sequence, are an all-reduce's; None
    where there is no such pair."""
    whole = _messages(build("all_reduce", algorithm, ranks, ranks, tiers=two_tiers(ranks)))
    for first in ALGORITHMS["reduce_scatter"]:
        for second in ALGORITHMS["all_gather"]:
            halves = build("reduce_scatter", first, ranks, ranks), build("all_gather", second, ranks, ranks)
            if _messages(chain(*halves, "all_reduce", algorithm)) == whole:
                return first, second
    return None


def _messages(s: Schedule) -> list[tuple[int, ...]]:
    return sorted(zip(*(c.tolist() for c in (s.round, s.source, s.destination, s.offset, s.length)), strict=True))


_MPI = {
    "broadcast": "MPI_Bcast",
    "reduce": "MPI_Reduce",
    "scatter": "MPI_Scatter",
    "gather": "MPI_Gather",
    "all_gather": "MPI_Allgather",
    "reduce_scatter": "MPI_Reduce_scatter_block",
    "all_to_all": "MPI_Alltoall",
    "all_reduce": "MPI_Allreduce",
    "barrier": "MPI_Barrier",
}
_MEANING = {
    "broadcast": "all get the root's buffer",
    "reduce": "the root gets the sum",
    "scatter": "each gets a part of the root's",
    "gather": "the root gets each one's part",
    "all_gather": "all get everyone's part",
    "reduce_scatter": "each gets a part of the sum",
    "all_to_all": "each gets a part from everyone",
    "all_reduce": "all get the sum",
    "barrier": "all wait for all",
}
