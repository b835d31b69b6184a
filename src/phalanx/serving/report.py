"""A serving plan on the terminal: the best, the front, and why not its neighbours."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from phalanx.report.style import empty_table
from phalanx.serving.answer import RejectedNeighbour, ServingPlanAnswer
from phalanx.serving.likely import has_medians, words
from phalanx.serving.search.answering import ServingAnswer
from phalanx.serving.search.misses import NAMES, loss_words
from phalanx.serving.search.question import ServingCandidate, ServingQuestion, load_words
from phalanx.serving.sweep import LoadAnswer


def _time(value: float) -> str:
    if value >= 10:
        return f"{value:,.1f} s"
    return f"{value * 1e3:,.0f} ms" if value >= 0.1 else f"{value * 1e3:,.1f} ms"


def candidate_table(
    candidates: Iterable[ServingCandidate], q: ServingQuestion, title: str, best: ServingCandidate | None
) -> Table:
    """Tabulate candidates with their simulated results; an arrow marks `best`."""
    out = empty_table(title)
    out.add_column("")
    out.add_column("layout of each copy")
    times = (f"{name}\np{q.percentile}" for name in ("TTFT", "TPOT"))
    for name in ("at once", "chunk", *times, "tok/s\n/user", "tok/s\n/GPU"):
        out.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for c in candidates:
        median = c.tpot_s(50)
        out.add_row(
            "→" if c == best else "",
            c.title.replace(" + ", " +\n"),
            f"{c.users:,}",
            f"{c.groups[0].step_tokens:,}",
            _time(c.ttft_s(q.percentile)),
            _time(c.tpot_s(q.percentile)),
            f"{1 / median:,.1f}" if median else "",
            f"{c.tokens_per_s / c.gpus:,.0f}",
        )
    return out


def latency_table(c: ServingCandidate) -> Table:
    """Tabulate quantiles of the latencies that users of a candidate see."""
    o, out = c.outcome, empty_table("what users see")
    assert o is not None
    out.add_column("")
    for name in ("mean", "50 %", "90 %", "99 %"):
        out.add_column(name, justify="right", no_wrap=True)
    rows = {
        "time to the first token (TTFT)": o.ttft,
        "  of it queueing": o.queueing,
        "per token after it (TPOT)": o.tpot,
        "between two tokens": o.gap,
        "whole request": o.latency,
    }
    for name, x in rows.items():
        out.add_row(name, *(_time(value) for value in (x.mean, x.p50, x.p90, x.p99)))
    return out


def load_table(loads: Sequence[LoadAnswer]) -> Table:
    """Tabulate the answers of several loads, without what is refused."""
    answered = [each for each in loads if not each.refused]
    rates = [next((r for r in each.likely if r.figure == "tokens_per_s"), None) for each in answered]
    several, ranged = len({each.deployment for each in answered}) > 1, any(rates)
    unlike = len({(each.input, each.output) for each in loads}) > 1
    out = empty_table("the loads")
    out.add_column("load")
    names = ("TTFT\np50", "TTFT\np99", "TPOT\np50", "TPOT\np99", "request\np50")
    for name in (
        *["tokens"] * unlike,
        *["deployment"] * several,
        "tok/s",
        *["likely\ntok/s"] * ranged,
        "requests/s",
        *names,
    ):
        out.add_column(name, justify="right", vertical="bottom")
    for x, rate in zip(answered, rates, strict=True):
        likely = "" if rate is None or rate.high is None else f"{rate.low:,.0f} to {rate.high:,.0f}"
        times = (x.ttft_p50_s, x.ttft_p99_s, x.tpot_p50_s, x.tpot_p99_s, x.latency_p50_s)
        out.add_row(
            x.load,
            *[f"{x.input:,} + {x.output:,}"] * unlike,
            *[x.deployment] * several,
            f"{x.tokens_per_s:,.0f}",
            *[likely] * ranged,
            f"{x.requests_per_s:,.2f}",
            *(_time(value or 0.0) for value in times),
        )
    return out


def neighbour_table(rows: Iterable[RejectedNeighbour]) -> Table:
    """Tabulate the neighbours with the reason against each."""
    out = empty_table("why not")
    out.add_column("instead", min_width=12)
    out.add_column("layout")
    out.add_column("then", ratio=1)
    for row in rows:
        title = row.candidate.title.replace(" + ", " +\n") if row.candidate else ""
        out.add_row(row.change, title, row.reason)
    return out


def lines(a: ServingAnswer, sure: list[str], held: list[str], cost: str) -> list[str]:
    """Describe the choice and its results in sentences. `sure`: on the likely ranges; `held`: on the cache; `cost`:
    on the cost of tokens, or empty."""
    q, c = a.question, a.best
    o = c.outcome
    assert o is not None
    load = load_words(q, c.users)
    if o.makespan_s is not None:
        load = f"{o.requests:,} requests, {load}: {_time(o.makespan_s)}"
    out = [f"{q.engine.title} on {c.gpus} x {q.cluster.device.name}: {c.title}, {load}"]
    if c.gpus < q.gpus:
        out.append(f"{q.gpus - c.gpus} of {q.gpus} GPUs are left over")
    each = f"{c.tokens_per_s / c.gpus:,.0f} tokens/s per GPU"
    out.append(f"{o.tokens_per_s:,.0f} tokens/s, {o.requests_per_s:,.2f} requests/s, {each}")
    out += sure
    if cost:
        out.append(cost)
    if o.kept and q.sustained:
        shares = (f"{k.share:.1%} ± {k.margin:.1%} keep the limit of {NAMES[k.limit]}" for k in o.kept)
        out.append(f"of {o.requests:,} requests {', '.join(shares)} (95 % confidence)")
    if q.lost[0]:
        out.append(f"these figures are of what is left when {loss_words(q)} {'is' if q.lost[0] == 1 else 'are'} lost")
    return [*out, *held, f"{a.evaluated:,} candidates in their steady state, {a.simulated:,} of them simulated"]


def likely(a: ServingPlanAnswer) -> list[str]:
    """Return the sentences on the likely ranges of the best deployment's figures, and on how much of its capacity a
    load at a rate takes."""
    q, most = a.search.question, a.capacity_requests_per_s
    said = [words(a.likely, a.likely_basis, has_medians(q), _time)]
    if most is not None:
        grows = ": the queue grows as long as they come" if q.offered > most else ""
        said.append(
            f"{q.offered:,.3g} requests/s are {q.offered / most:.0%} of the {most:,.3g} that can be answered{grows}"
        )
    return said


def cache(a: ServingPlanAnswer) -> list[str]:
    """Describe the cache of the best deployment: its size, the requests that fit, and its part of the memory."""
    q, o, workers = a.search.question, a.search.best.outcome, a.search.best.groups[-1]
    state = f" and {a.state_bytes_per_request:,.0f} of states per request" if a.state_bytes_per_request else ""
    each, replicas = workers.cache_tokens // workers.layout.attention_dp, workers.count * workers.layout.attention_dp
    size = f"{each:,} tokens"
    if replicas > 1:
        size += f" in each of {replicas:,} replicas, {replicas * each:,} in all"
    held = f"KV cache: {a.kv_bytes_per_token:,.0f} bytes per token{state}; {size}; "
    held += f"{a.requests_that_fit:,} requests of {q.input:,} + {q.output:,} tokens fit"
    held += f"; {o.preemptions:,} preemptions" if o is not None and o.preemptions else ""
    return [held, f"of a GPU weights and cache have {a.memory}"]
