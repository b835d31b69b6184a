"""A serving plan on the terminal: the best, the front, and why not its neighbours."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from phalanx.plan.serving.neighbours import Neighbour
from phalanx.plan.serving.question import Candidate, Question
from phalanx.plan.serving.search import Answer
from phalanx.report.style import empty_table


def _ms(value: float) -> str:
    return f"{value * 1e3:,.0f} ms" if value >= 0.1 else f"{value * 1e3:,.1f} ms"


def ranked(candidates: Iterable[Candidate], q: Question, title: str, best: Candidate | None) -> Table:
    """Tabulate candidates with what was simulated of them."""
    out = empty_table(title)
    out.add_column("")
    out.add_column("layout of each copy", ratio=1)
    for name in ("at once", "chunk", f"TTFT p{q.percentile}", f"TPOT p{q.percentile}", "tok/s/user", "tok/s/GPU"):
        out.add_column(name, justify="right", no_wrap=True)
    for c in candidates:
        median = c.tpot_s(50)
        out.add_row(
            "→" if c == best else "",
            c.title,
            f"{c.users:,}",
            f"{c.groups[0].step_tokens:,}",
            _ms(c.ttft_s(q.percentile)),
            _ms(c.tpot_s(q.percentile)),
            f"{1 / median:,.1f}" if median else "",
            f"{c.tokens_per_s / c.gpus:,.0f}",
        )
    return out


def against(rows: Iterable[Neighbour]) -> Table:
    """Tabulate the neighbours with what speaks against each."""
    out = empty_table("why not")
    out.add_column("instead", no_wrap=True)
    out.add_column("layout")
    out.add_column("then", ratio=1)
    for row in rows:
        out.add_row(row.change, row.candidate.title if row.candidate else "", row.reason)
    return out


def lines(a: Answer, cache_bytes: float, fits: int, money: float | None) -> list[Text]:
    """Say what was chosen and what it gives, in sentences."""
    q, c = a.question, a.best
    o = c.outcome
    assert o is not None
    load = (
        f"{len(q.trace):,} requests of the trace"
        if q.trace is not None
        else f"{q.rate:g} requests/s"
        if q.rate
        else f"{c.users:,} requests at once"
    )
    idle = f"; {q.gpus - c.gpus} of {q.gpus} GPUs are left over" if c.gpus < q.gpus else ""
    out = [
        f"{q.engine.title} on {c.gpus} x {q.cluster.device.name}: {c.title}; {load}{idle}",
        f"throughput {o.tokens_per_s:,.0f} tokens/s, {o.requests_per_s:.2f} requests/s, "
        f"{c.tokens_per_s / c.gpus:,.0f} tokens/s per GPU"
        + (f", {money:,.2f} per million generated tokens" if money is not None else ""),
        f"TTFT {_spread(o.ttft)}; of it queueing {_spread(o.queueing)}",
        f"TPOT {_spread(o.tpot)}; between two tokens {_spread(o.gap)}",
        f"KV cache: {cache_bytes:,.0f} bytes per token; {fits:,} requests of {q.input:,} + {q.output:,} tokens fit"
        + (f"; {o.preemptions:,} preemptions" if o.preemptions else ""),
        f"{a.evaluated:,} candidates in their steady state, {a.simulated:,} simulated",
    ]
    return [Text(line) for line in out]


def _spread(x: object) -> str:
    p50, p90, p99 = (getattr(x, name) for name in ("p50", "p90", "p99"))
    return f"{_ms(p50)} / {_ms(p90)} / {_ms(p99)} (50 / 90 / 99 %)"
