"""The answer to a question: the simulated finalists, the best of them, and the Pareto front.

If requests arrive at a rate without end, the best keeps its limits in a simulation of ten times as many.
"""

from dataclasses import dataclass

from phalanx.serving.search.misses import none_keeps, none_serves
from phalanx.serving.search.pairs import SLACK
from phalanx.serving.search.question import ServingCandidate, ServingQuestion
from phalanx.serving.search.search import Search, best_of_each, pareto
from phalanx.serving.search.sizing import ALTERNATIVES, fewest_gpus

_FINALISTS, _FRONT = 8, 10


@dataclass(frozen=True)
class ServingAnswer:
    """The result of a search."""

    question: ServingQuestion
    best: ServingCandidate
    finalists: tuple[ServingCandidate, ...]
    """The best of each family within the limits, simulated; the best first."""
    front: tuple[ServingCandidate, ...]
    """The Pareto front of tokens/s per user and per GPU, simulated, whatever the limits."""
    evaluated: int
    """Candidates whose steady state was computed."""
    simulated: int
    """Candidates whose queue was simulated."""
    cannot: dict[str, str]
    """Layout -> why it cannot serve."""


def answer(search: Search) -> ServingAnswer:
    """Search for the best deployment. Raises InputError if none can serve the model or keeps the limits, with the
    nearest one and a number of GPUs that would be enough."""
    q = search.q
    everything = search.candidates()
    if not everything:
        raise none_serves(search)
    promising = [c for c in everything if search.keeps(c, SLACK)]
    if q.sized:
        finalists = fewest_gpus(search, promising, q.gpus, ALTERNATIVES)
    else:
        # Steady states rank layouts within a mode only: they ignore the queue between prefill and decoding.
        ranked = best_of_each(promising, search)
        modes = ([c for c in ranked if (len(c.groups) > 1) == apart][:_FINALISTS] for apart in (False, True))
        seen = (search.refined(c) for of_mode in modes for c in of_mode)
        finalists = best_of_each((c for c in seen if c is not None), search)
        if q.sustained:
            lasting = next(((i, long) for i, c in enumerate(finalists) if (long := search.lasts(c))), None)
            finalists = [lasting[1], *finalists[lasting[0] + 1 :]] if lasting else []
    if not finalists:
        raise none_keeps(search, everything)
    front = [] if q.open_load else pareto(everything)
    every = max(1, len(front) // _FRONT)
    drawn = [search.simulate(c) for c in front[::every]]
    cannot = {
        f"tp={x.tp},pp={x.pp},dp={x.attention_dp},ep={x.moe_ep}, {weights}": copy.missing
        for (weights, x), copy in search.known.items()
        if copy.missing
    }
    return ServingAnswer(
        q,
        finalists[0],
        tuple(finalists[:_FINALISTS]),
        tuple(pareto([*drawn, *finalists])),
        search.evaluated,
        search.simulated,
        cannot,
    )
