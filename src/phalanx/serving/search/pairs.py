"""Separate prefill and decode workers: how many of each, and how many requests.

A prefill worker computes a step of n prompts, dealt to its attention groups, in t(n) seconds, n / t(n) requests per
second: with more prompts together it serves more, and each takes longer. n is the largest number for which a prompt,
which first waits for half a step of others, keeps the limit of the first token.
"""

import math
from collections.abc import Iterator

import numpy as np

from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.search.copies import Copy
from phalanx.serving.search.question import MOST_GPUS, ServingCandidate, ServingQuestion, SteadyEstimate, WorkerGroup
from phalanx.serving.search.queued import transfer

BATCHES = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192),
    *(16384, 32768, 65536),
)
SLACK = 1.15
"""The largest ratio of a steady state to its limit at which a candidate is simulated."""
PREFILL_USE = 0.8
"""The largest share of a prefill worker's time in use: above it the queue grows fast."""
BOUND_USE = 0.97
"""The same in a search for the fewest workers: with fewer the queue never ends."""


def prompt_chunks(q: ServingQuestion, x: ServingLayout) -> tuple[int, ...]:
    """Return the token budgets to try for prefill workers: one for a prompt or two, and with data-parallel attention
    also the largest, because experts wait for all groups."""
    usual = max(c for c in q.chunks if c <= max(2 * q.input, min(q.chunks)))
    return (usual, max(q.chunks)) if x.attention_dp > 1 and max(q.chunks) > usual else (usual,)


def prompts_together(q: ServingQuestion, first: Copy, chunk: int) -> tuple[float, float]:
    """Return (requests/s of a prefill worker, seconds to a prompt's first token with the transfer of its cache), with
    as many prompts in a step as the limit of the first token allows; rate 0: not even one."""
    if chunk in first.together:
        return first.together[chunk]
    use = BOUND_USE if q.sized else PREFILL_USE
    moved = transfer(q, first, q.gpus).seconds(q.input)
    most, groups = first.prompts_at_once(chunk), first.layout.attention_dp
    peak, best = most / first.prefill_s(chunk, most), (0.0, 0.0)
    for n in sorted({1, min(groups, 4), groups, most}) if groups > 1 and q.objective != "latency" else (1,):
        step = first.prefill_s(chunk, n)
        ttft = step if n == 1 else 1.5 * step
        if q.ttft_s is not None and ttft + moved > q.ttft_s * SLACK:
            break
        best = min(n / step, use * peak), ttft + moved
    first.together[chunk] = best
    return best


def best_prefills(q: ServingQuestion, copies: list[Copy]) -> list[tuple[Copy, int]]:
    """Return (prefill worker, chunk) for workers that no other beats in GPUs, requests/s of a GPU and time of a
    prompt."""
    able = []
    for copy in copies:
        for chunk in prompt_chunks(q, copy.layout):
            rate, moved = prompts_together(q, copy, chunk)
            if rate:
                able.append((copy, chunk, copy.layout.gpus, -rate / copy.layout.gpus, moved))
    kept = []
    for copy, chunk, *mine in able:
        others = (its for c, _, *its in able if c.weights == copy.weights and its != mine)
        if not any(all(a <= b for a, b in zip(its, mine, strict=True)) for its in others):
            kept.append((copy, chunk))
    return kept


def _batches(q: ServingQuestion, then: Copy) -> list[int]:
    """Return the decoding batches that keep the limit of a token."""
    able = [batch for batch in BATCHES if batch <= then.most]
    most = float("inf") if q.tpot_s is None else q.tpot_s * (1 if q.sized else SLACK)
    return [batch for batch in able if then.decode_s(batch) <= most]


def workers_before(q: ServingQuestion, rate: float, moved: float) -> int:
    """Return the number of prefill workers, each of `rate` requests/s, that keep the limit of the first token, which
    takes `moved` seconds without a queue. For the waiting times of M/D/c, P(W > t) is about
    C exp(-2 (1 - rho) c rate t), with Erlang's C about rho^(sqrt(2 (c + 1)) - 1) (Sakasegawa 1977)."""
    c = math.ceil(q.offered / (BOUND_USE * rate))
    if q.ttft_s is not None:
        while c < MOST_GPUS:
            rho = q.offered / (c * rate)
            late = rho ** (math.sqrt(2 * (c + 1)) - 1) / (1 - q.percentile / 100)
            if moved + math.log(max(late, 1.0)) / (2 * (1 - rho) * c * rate) <= q.ttft_s:
                break
            c += 1
    return c


def crowding(q: ServingQuestion, tpot: float) -> float:
    """Return the ratio of the number of decoding requests, at the question's percentile over time, to its mean: they
    arrive as a Poisson process."""
    mean = max(q.offered * q.output * tpot, 1.0)
    return 1 + {50: 0.0, 90: 1.28, 99: 2.33}[q.percentile] / math.sqrt(mean)


def pairs(q: ServingQuestion, first: Copy, then: Copy, chunk: int) -> Iterator[ServingCandidate]:
    """Yield candidates that prefill on copies like `first`, in chunks of `chunk` tokens, and decode on copies like
    `then`, by the decoding batch."""
    rate, moved = prompts_together(q, first, chunk)
    if not rate:
        return
    lost = q.workers_lost(first.layout.gpus), q.workers_lost(then.layout.gpus)
    prefills = np.arange(1, q.gpus // first.layout.gpus + 1)
    decodes = (q.gpus - prefills * first.layout.gpus) // then.layout.gpus
    if q.pair:
        prefills, decodes = (np.array([count]) for count, _ in q.pair)
    room = (prefills > lost[0]) & (decodes > lost[1])
    prefills, decodes = prefills[room], decodes[room]
    batches = _batches(q, then)
    if not q.sized and not len(prefills):
        return
    for batch in batches[-1:] if q.sized else batches:  # the largest takes the fewest workers
        tpot = then.decode_s(batch)
        each = batch / (q.output * tpot)  # requests/s of a worker that decodes
        if q.sized:
            served = q.offered
            before = workers_before(q, rate / BOUND_USE, moved) + lost[0]
            after = math.ceil(served * crowding(q, tpot) / each) + lost[1]
        else:
            able = np.minimum((prefills - lost[0]) * rate, (decodes - lost[1]) * each)
            best = int(np.argmax(able))  # the first of equals has the fewest that prefill
            served, before = float(able[best]), int(prefills[best])
            # Decode workers beyond what prompts need would idle.
            needed = int(decodes[best]) if q.pair else math.ceil(served / each)
            after = max(1, min(int(decodes[best]) - lost[1], needed)) + lost[1]
        left = after - lost[1]
        users = min(left * batch, max(1, round(served * q.output * tpot))) + max(1, round(served * moved))
        slots = batch
        if q.concurrency:
            users, slots = q.concurrency, min(then.most, max(batch, -(-q.concurrency // left)))
        elif q.open_load:  # slots for all that fit; the steady state is of the smallest batch that keeps up
            if served < q.offered and batch < BATCHES[-1] and 2 * batch <= then.most:
                continue
            slots = max(b for b in BATCHES if b <= then.most)
            users, served = slots * left, min(served, q.offered)
        budget = max(chunk, 2 * slots * (1 + q.draft_tokens))
        groups = (
            WorkerGroup("prefill", first.layout, before, first.prompt_slots, chunk, first.cache_tokens),
            WorkerGroup("decode", then.layout, after, slots, budget, then.cache_tokens),
        )
        steady = SteadyEstimate(moved + then.way_s(tpot), tpot, served * q.output)
        yield ServingCandidate(first.weights, groups, users, steady)
        if q.open_load:
            return
