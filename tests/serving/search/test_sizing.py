"""The fewest GPUs for a load: whatever deployment the search begins with, it ends with the fewest workers that keep
the limits, where some number of each kind does, and any more do too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.question import ask
from phalanx.serving.request import ServingRequest
from phalanx.serving.search.question import ServingCandidate, SteadyEstimate, WorkerGroup
from phalanx.serving.search.sizing import ALTERNATIVES, _with_more, fewest_gpus
from phalanx.serving.simulation.outcome import Quantiles, ServingOutcome
from phalanx.serving.simulation.requests import equal_requests, with_arrivals

_Q = ask(
    ServingRequest(
        **{"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 64, "input": 1000, "output": 100, "rate": 9.0},
        **{"objective": "cost", "ttft": "1s", "tpot": "30ms"},
    )
).question


def _candidate(*counts: int, tp: int = 1, ttft_s: float = 0.5) -> ServingCandidate:
    roles: tuple[Any, ...] = ("both",) if len(counts) == 1 else ("prefill", "decode")
    x = ServingLayout(tp, 1, 1, tp, 1)
    groups = tuple(WorkerGroup(role, x, n, 8, 2048, 10**6) for role, n in zip(roles, counts, strict=True))
    return ServingCandidate("bf16", groups, 8, SteadyEstimate(ttft_s, 0.01, 900.0))


def _outcome(queueing_s: float, tpot_s: float) -> ServingOutcome:
    waits, tokens = (Quantiles(*4 * (x,)) for x in (queueing_s, tpot_s))
    return ServingOutcome(waits, waits, tokens, tokens, waits, 900.0, 9.0, 8.0, 0, 400)


class _Search:
    """A search in which each layout needs so many workers of each kind, and so many where requests do not end."""

    def __init__(self, needed: dict[int, tuple[int, ...]], lasting: dict[int, tuple[int, ...]] | None = None) -> None:
        self.q, self.needed, self.lasting = _Q, needed, lasting or needed
        self.seen: list[ServingCandidate] = []

    def simulate(self, c: ServingCandidate) -> ServingCandidate:
        assert c.outcome is None  # of other counts
        self.seen.append(c)
        enough = self._enough(c, self.needed)
        return replace(c, outcome=_outcome(0.1 if enough[0] else 5.0, 0.01 if enough[-1] else 0.2))

    def keeps(self, c: ServingCandidate) -> bool:
        return all(self._enough(c, self.needed))

    def lasts(self, c: ServingCandidate) -> ServingCandidate | None:
        return replace(c, users=10**6) if all(self._enough(c, self.lasting)) else None

    @staticmethod
    def _enough(c: ServingCandidate, needed: dict[int, tuple[int, ...]]) -> list[bool]:
        return [g.count >= n for g, n in zip(c.groups, needed[c.groups[0].layout.tp], strict=False)]


def _counts(c: ServingCandidate) -> tuple[int, ...]:
    return tuple(g.count for g in c.groups)


def _fewest(search: _Search, *bounds: ServingCandidate, **options: Any) -> list[ServingCandidate]:
    return fewest_gpus(search, list(bounds), **{"gpus": 64} | options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kinds", [1, 2])
def test_it_is_the_same_from_wherever_it_begins(seed: int, kinds: int) -> None:
    draw = np.random.default_rng(seed)
    needed = tuple(int(n) for n in draw.integers(1, 12, kinds))
    begun = [max(1, n + int(draw.integers(-6, 7))) for n in needed]
    search = _Search({1: needed})
    (best,) = _fewest(search, _candidate(*begun))
    assert (_counts(best), best.users) == (needed, 10**6)
    (close,) = _fewest(_Search({1: needed}), _candidate(*begun), gpus=sum(map(max, begun, needed)))
    assert close == best
    assert not _fewest(_Search({1: needed}), _candidate(*begun), gpus=sum(needed) - 1)
    # What is lost is kept beyond doubt.
    search.q = replace(_Q, lost=(2, "copy"))
    (spare,) = _fewest(search, _candidate(*(20 for _ in needed)))
    assert _counts(spare) == tuple(max(n, 3) for n in needed)


@pytest.mark.parametrize(("kept", "lasting", "found"), [(3, 3, 3), (3, 5, 7), (3, 7, 7), (3, 9, 9)])
def test_it_keeps_the_limits_ten_times_as_long(kept: int, lasting: int, found: int) -> None:
    """The fewest that do for a while, else as many as it began with, else more."""
    search = _Search({1: (kept,)}, {1: (lasting,)})
    (best,) = _fewest(search, _candidate(7))
    assert (_counts(best), best.users) == ((found,), 10**6)
    search.q = replace(_Q, trace=with_arrivals(equal_requests(9, 10, 10), 9.0, 0), rate=0.0)  # which ends
    (best,) = _fewest(search, _candidate(7))
    assert (_counts(best), best.users) == ((kept,), 8)


def test_what_else_would_do_comes_after_it_as_far_as_it_comes_next() -> None:
    """The most GPUs of a worker last; of those with as many, the slowest last."""
    needed = {1: (6,), 2: (4,), 4: (3,), 8: (2,)}
    bounds = [_candidate(n, tp=tp) for tp, (n,) in needed.items()]
    search = _Search(needed)
    kept = _fewest(search, *bounds, others=ALTERNATIVES)
    assert [_counts(c) for c in kept] == [(6,), (4,), (3,)]
    assert [c.outcome is not None for c in kept] == [True] * 3
    assert [c.groups[0].layout.tp for c in _fewest(_Search(needed), *bounds)] == [1]
    assert [c.groups[0].layout.tp for c in _fewest(_Search(needed), *bounds, others=9)] == [1, 2, 4, 8]
    assert not _fewest(_Search({1: (60,)}), _candidate(1), sure=False)  # no more than a few are tried
    (some,) = _fewest(_Search(needed), _candidate(9), sure=False)
    assert (_counts(some), some.users) == ((9,), 8)  # none is taken from it, and it need not last
    fast, slow = (_candidate(6, ttft_s=ttft_s) for ttft_s in (0.2, 0.4))
    assert [c.steady.ttft_s for c in _fewest(_Search(needed), slow, fast, others=1)] == [0.2, 0.4]


def test_no_more_than_two_begin_alike() -> None:
    """On workers of one layout and type of weights, in one of both modes: the smallest, and of those the fastest."""
    apart = [_candidate(2, 2, ttft_s=ttft_s) for ttft_s in (0.4, 0.1, 0.2, 0.3)]
    together = [_candidate(4, ttft_s=ttft_s) for ttft_s in (0.4, 0.1, 0.2)]
    wide, smaller = _candidate(2, tp=2), replace(_candidate(4), weights="fp8")
    bounds = [*apart, *together, wide, smaller, _candidate(3, 3), _candidate(5)]
    search = _Search({1: (9, 9), 2: (9, 9)})
    assert not _fewest(search, *bounds, gpus=4)  # none grows
    assert set(search.seen) == {apart[1], apart[2], together[1], together[2], wide, smaller}


@pytest.mark.parametrize("ttft_s", [0.5, 4.0])
@pytest.mark.parametrize(("share", "tpot_s", "grown"), [(0.9, 0.02, 0), (0.1, 0.02, 1), (0.9, 0.05, 1)])
def test_workers_are_added_where_requests_wait(ttft_s: float, share: float, tpot_s: float, grown: int) -> None:
    """Before the first token, or while tokens come too slowly: at least one, and a twentieth of many."""
    q = replace(_Q, ttft_s=ttft_s)
    for count, more in ((1, 1), (10, 1), (100, 5)):
        c = replace(_candidate(count, count), outcome=_outcome(share * ttft_s, tpot_s))
        assert [n - count for n in _counts(_with_more(q, c))] == [more * (grown == 0), more * (grown == 1)]
        together = replace(_candidate(count), outcome=_outcome(share * ttft_s, tpot_s))
        assert _counts(_with_more(q, together)) == (count + more,)
