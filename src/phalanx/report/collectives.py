"""Views of collectives: their rounds and proofs, and the costs of algorithms and transports."""

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.answers.schedules.collectives import (
    AllReduceBound,
    CollectiveComparison,
    CollectiveMeasurement,
    CollectiveProof,
    CollectiveSteps,
    ProofCount,
    proof_of,
)
from phalanx.answers.schedules.own_reduction import OwnReduction
from phalanx.planning.tables.collectives import AlgorithmComparison
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.gallery.collectives import algorithms_over_size, rounds
from phalanx.report.gallery.round_words import cells, sent
from phalanx.report.style import count_words
from phalanx.report.view import View
from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.proof import Counts, Run, run
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import CollectiveFit


def steps(schedule: Schedule, node: int = 0) -> Iterator[str | Sheet]:
    """Yield, for the start and every round, the messages and a table of each rank's chunks after it. With `node`, the
    ranks of a node, messages between nodes are marked."""
    symbolic = run(schedule)
    for number, counts in symbolic.states():
        title = "start" if number == 0 else f"round {number} of {schedule.rounds}"
        yield f"{title}{_messages(symbolic, number - 1, node)}"
        yield _holdings(symbolic, counts, number)


def _messages(symbolic: Run, number: int, node: int) -> str:
    """Return a line per message of a round: what is sent, and whether the receiver adds or keeps it."""
    return "".join(
        f"\n  {source} -> {destination}: {what}, {destination} {'adds' if reduces else 'keeps'} it"
        f"{', between nodes' if node and source // node != destination // node else ''}"
        for source, destination, what, reduces in sent(symbolic, number)
    )


def _holdings(symbolic: Run, counts: Counts, number: int) -> Sheet:
    """Tabulate the contributions that each rank has: a column per chunk, or per block of an all-to-all's buffer."""
    words = cells(symbolic, counts, number)
    column = "block" if symbolic.schedule.op == "all_to_all" else "chunk"
    wide = len(words[0]) <= _WIDE
    names = (f"{column} {i}" if wide or i == 0 else str(i) for i in range(len(words[0])))
    return Sheet("", columns("rank [count]", *names), [(rank, *row) for rank, row in enumerate(words)], charted=False)


_WIDE = 6
"""The most columns whose headings all have the word chunk or block."""


def proof(a: CollectiveProof) -> View:
    """Show a proof in one line."""
    sent = f"{count_words(a.rounds, 'round')}, {count_words(a.messages, 'message')}"
    return View([f"proved: {a.op} by {a.algorithm}; {sent}, at most {a.sent_share:.4g} of the buffer sent by a rank"])


def algorithm(a: CollectiveSteps) -> View:
    """Show the rounds of an algorithm, and its proof."""
    parts = [*steps(a.schedule, a.node), *proof(proof_of(a.schedule)).parts]
    return View(parts, a.op, lambda: [rounds(a.schedule, a.node)])


def proof_count(a: ProofCount) -> View:
    """Show how many schedules were proved, and why others were refused."""
    proved = a.schedules - len(a.refused)
    return View([*a.refused, f"{proved} of {a.schedules} schedules proved, 1 to {a.max_ranks} ranks"])


def own_reduction(a: OwnReduction) -> View:
    """Show whether a reduction of the user's own is right."""
    order = ", ".join(map(str, a.order))
    return View(
        [
            f"{a.algorithm} {a.op} needs a function that is {a.needs}: it combines ranks in the order {order}",
            f"{a.function} has that on drawn integers (a search for a counterexample, no proof)",
            f"run on {a.ranks} ranks: {a.wrong:,} of {a.elements:,} elements differ from one process",
        ]
    )


def bound(a: AllReduceBound) -> View:
    """Show the fewest messages of an all-reduce, and why there are no fewer."""
    return View(
        [
            f"{a.messages} messages = 2 (P-1) are the fewest that leave an element's sum on all {a.ranks} ranks: "
            f"with fewer, {a.states:,} states can be reached, and none has it",
            "why: until a first rank has the whole sum, each of the P-1 others has sent at least once; after that "
            "each of them has yet to receive it",
            f"so {a.ranks} ranks send {a.messages} n bytes in all, and some rank at least 2 n (P-1)/P = "
            f"{a.sent_share:g} n; a ring sends just that",
        ]
    )


def algorithms(a: CollectiveComparison) -> View:
    """Show algorithms, the fastest by size, and crossovers."""
    what = a.op if a.op == "barrier" else f"{a.op} of {a.size}"
    table = comparison(a, f"{what} over {a.ranks} ranks of {a.cluster}")
    fastest = ["fastest, by size of the buffer:", *(f"  {line}" for line in winners(a))] if a.winners else []
    return View([table, *fastest, *crossovers(a)], a.op, lambda: [algorithms_over_size(a.op, a.ranks, a.cluster)])


def measurement(a: CollectiveMeasurement) -> View:
    """Show a measured collective, and the transport and algorithm chosen for each size."""
    title = f"{a.op} of {a.size_bytes:,} bytes over {a.ranks} ranks of this machine"
    lines = ("auto takes, by size of the buffer:", *(f"  {line}" for line in choices(a.choices)))
    return View([fitted_lines([row.fit for row in a.rows], a.size_bytes, title), *lines])


def comparison(compared: AlgorithmComparison, title: str) -> Sheet:
    """Tabulate algorithms, fastest first.

    `x bound` is the time over the lower bound on these links, `m` the best number of segments."""
    formulas = any(row.formula_seconds is not None for row in compared.rows)
    rows: list[tuple[Any, ...]] = []
    for row in compared.rows:
        name = row.algorithm if row.segments is None else f"{row.algorithm}, m = {row.segments}"
        rates = () if compared.rows[0].busbw_bytes_per_s is None else (row.busbw_bytes_per_s,)
        times = (row.seconds, *rates, row.seconds / row.bound if row.bound else None)
        rows.append((name, row.rounds, row.sent_bytes, *times, *([row.formula_seconds] if formulas else [])))
    names = columns("algorithm | rounds [count] | most bytes sent [count] | time [s]")
    names += columns("busbw [rate]") if compared.rows[0].busbw_bytes_per_s is not None else ()
    names += columns("x bound [count]")
    names += columns("formula [s]") if formulas else ()
    return Sheet(title, names, rows, charted=False)


def winners(compared: AlgorithmComparison) -> list[str]:
    """Return a line per range of sizes in which one algorithm is the fastest."""
    return [f"{_binary(low)} to {_binary(high)}: {name}" for low, high, name in compared.winners]


def fitted_lines(fits: Sequence[CollectiveFit], size: float, title: str) -> Sheet:
    """Tabulate every transport and algorithm by which a collective was measured, fastest first."""
    rows = []
    for fit in sorted(fits, key=lambda f: float(f.seconds(size))):
        time, beta = float(fit.seconds(size)), fit.beta_s_per_byte
        crossover = fit.alpha_s / beta if beta else None
        rows.append((fit.way, time, size / time, fit.alpha_s, beta * 1e9, crossover, fit.fit_error))
    names = columns("over | time [s] | algbw [rate] | alpha [s] | ns/B [number] | n* [bytes] | error [share]")
    note = "alpha, ns/B, n* = alpha/beta: of the fitted line, with its median error"
    return Sheet(title, names, rows, note, charted=False)


def choices(chosen: Sequence[Choice]) -> list[str]:
    """Return a line per range of sizes with the chosen transport and algorithm, and the reason."""
    return [f"from {_binary(c.from_bytes)}: {c.way} ({c.reason})" for c in chosen]


def crossovers(compared: AlgorithmComparison) -> list[str]:
    """Return a line per tier of links: the size at which a message's latency costs as much as its bytes."""
    return [f"crossover n* = alpha/beta: {c.tier} {_decimal(c.bytes)}" for c in compared.crossovers]


def _decimal(n: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.3g} B"


def _binary(n: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.4g} {unit}"
    return f"{n:g} B"
