"""The errors of a search without a result: no deployment serves the model, or none keeps the limits; and how many
GPUs would be enough."""

from phalanx.serving.search.pairs import SLACK
from phalanx.serving.search.question import MOST_GPUS, ServingCandidate, ServingQuestion
from phalanx.serving.search.queued import excess, latency_of
from phalanx.serving.search.search import Search
from phalanx.serving.search.sizing import fewest_gpus
from phalanx.spec.errors import InputError

_DOUBLINGS = 4
_BETWEEN = 8
"""Numbers of GPUs to try between two doublings."""
_TRIED = 3
"""Candidates to simulate on each number of GPUs."""
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "deadline": "whole request"}


def none_serves(search: Search) -> InputError:
    """Return the error of a question without any candidate."""
    q, copies = search.q, list(search.known.values())
    if not copies:
        reason = "no layout of the model is legal on them"
        return InputError("gpus", q.gpus, reason, "its heads, layers and experts must be divided evenly")
    able = [c for c in copies if not c.missing]
    if able:
        if q.lost[0] and "aggregated" in q.modes:
            reason = f"no copy is left when {loss_words(q)} {'is' if q.lost[0] == 1 else 'are'} lost"
            return InputError("gpus", q.gpus, reason, "give more GPUs")
        reason = "a worker that prefills and one that decodes need more"
        return InputError("gpus", q.gpus, reason, "give more GPUs, or --mode aggregated")
    largest = max(copies, key=lambda c: (c.cache_tokens, -c.pricing.weight_bytes(c.layout)))
    x = largest.layout
    degrees = f"tp={x.tp},pp={x.pp},dp={x.attention_dp},ep={x.moe_ep}"
    short = f"in {largest.weights}, {largest.missing}"
    remedy = "smaller weights (--weights)"
    if largest.cache_tokens > 0:  # otherwise weights alone take more than there is
        remedy += " or a smaller cache (--kv fp8)"
    if search.only is not None or q.pair:
        return InputError("layout", degrees, f"holds no request: {short}", f"another layout, or {remedy}")
    enough = _holding(search)
    more = f"{enough} GPUs hold one; or use {remedy}" if enough else f"more GPUs, {remedy}"
    return InputError("gpus", q.gpus, f"no layout holds a request: on {degrees} {short}", more)


def none_keeps(search: Search, everything: list[ServingCandidate]) -> InputError:
    """Return the error of a question whose candidates all miss the limits: the nearest one, by how much it misses
    them, and how many GPUs would be enough."""
    q = search.q
    tried = sorted((c for c in everything if c.gpus <= q.gpus), key=lambda c: excess(q, c))[:4]
    tried = tried or sorted(everything, key=lambda c: c.gpus)[:1]
    best = min((search.simulate(c) for c in tried), key=lambda c: excess(q, c))
    missed = [
        f"{NAMES[name]} {_time(latency_of(q, best, name))} of {_time(most)}, {latency_of(q, best, name) / most:.2f} x"
        for name, most in q.limits.items()
        if latency_of(q, best, name) > most
    ]
    if not missed and q.open_load:
        missed.append(f"{best.outcome.requests_per_s if best.outcome else 0:.2f} of {q.offered:.3g} requests/s")
    fields = [*q.limits, *(["trace" if q.trace is not None else "rate"] if q.open_load else [])]
    if best.gpus > q.gpus:
        reason = f"the load takes more than {q.gpus:,} GPUs"
    else:
        users = "" if q.open_load else f" with {best.users:,} request{'s' if best.users != 1 else ''} at once"
        reason = f"no deployment on {q.gpus:,} GPUs stays within the limits for {q.percentile} % of requests"
        reason += f" when {loss_words(q)} {'is' if q.lost[0] == 1 else 'are'} lost" if q.lost[0] else ""
        reason += f"; the nearest, {best.title}{users}: " + "; ".join(missed)
    enough = _enough(search)
    if enough is None:
        remedy = "relax a limit or shorten the prompts: more GPUs alone were not found to do"
    else:
        remedy = f"{enough.gpus:,} GPUs would do: {enough.title}"
    return InputError(", ".join(fields), None, reason, remedy)


def loss_words(q: ServingQuestion) -> str:
    """Return the nodes, GPUs or copies that are lost, in words."""
    count, kind = q.lost
    return f"{count} {kind}{'s' if count != 1 and kind != 'copy' else ''}"


def _holding(search: Search) -> int | None:
    """Return the GPUs of the smallest copy whose cache holds a request, of a few numbers of nodes up to the first
    doubling with one; None: there is none."""
    q = search.q
    for gpus in _larger(q):
        if any(True for _ in search.on(gpus).copies()):
            node = q.cluster.ranks_per_node
            apart = node * -(-(gpus // 2) // (_BETWEEN * node))
            tried = [*range(gpus // 2 + apart, gpus, apart), gpus]
            return next(copy.layout.gpus for more in tried for copy in search.on(more).copies())
    return None


def _larger(q: ServingQuestion) -> list[int]:
    return [q.gpus * 2**n for n in range(1, _DOUBLINGS + 1) if q.gpus * 2**n <= MOST_GPUS]


def _enough(search: Search) -> ServingCandidate | None:
    """Return a deployment on more GPUs that keeps the limits; None: the search has no such result."""
    q = search.q
    if q.open_load:
        sized = search.on(q.gpus, "cost")
        bounds = [c for c in sized.candidates() if sized.keeps(c, SLACK)]
        return next(iter(fewest_gpus(sized, bounds, MOST_GPUS)), None)
    for gpus in _larger(q):
        larger = search.on(gpus)
        able = [c for copy in larger.copies() for c in larger.aggregated(copy) if larger.keeps(c)]
        for c in sorted(able, key=lambda c: c.users)[:_TRIED]:
            if larger.keeps(seen := larger.simulate(c)):
                return seen
    return None


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
