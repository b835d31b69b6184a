"""Requirements of context parallelism on a model and a sequence: equal parts for all of its ranks.

cp = ring x ulysses: the ring passes keys and values around (Liu et al. 2023), Ulysses gives each of its ranks a part
of the heads (Jacobs et al. 2023). Both together: Fang & Zhao 2024, "USP". A ring of r ranks cuts a sequence into
2r chunks, two per rank, so that causal attention costs all of them the same.
"""

from __future__ import annotations

import math

from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local_model


def require_context(spec: ModelSpec, seq: int, s: Strategy) -> None:
    """Raise InputError where cp does not cut sequences of `seq` tokens, or the heads, into equal parts."""
    if s.cp == 1:
        return
    chunks = 2 * s.ring if s.ring > 1 else 1
    for n, label in ((s.cp, f"strategy.cp = {s.cp}"), (chunks, f"{chunks}, the chunks of a ring of {s.ring}")):
        if seq % n:
            raise InputError(
                "job.seq", seq, f"is not divisible by {label}", f"use a multiple of {math.lcm(s.cp, chunks)}"
            )
    of_tp_rank = local_model(spec, s)
    of_rank = f" of a tp rank ({spec.heads} / {s.tp})" if s.tp > 1 else ""
    if of_tp_rank.heads % s.ulysses:
        raise InputError(
            "strategy.ulysses",
            s.ulysses,
            f"does not divide model.heads = {of_tp_rank.heads}{of_rank}",
            "every rank must take the same number of heads",
        )
    if of_tp_rank.kv_heads % s.ulysses and s.ulysses % of_tp_rank.kv_heads:
        of_rank = f" of a tp rank ({spec.kv_heads} / {s.tp})" if s.tp > 1 else ""
        raise InputError(
            "strategy.ulysses",
            s.ulysses,
            f"neither divides model.kv_heads = {of_tp_rank.kv_heads}{of_rank} nor is a multiple of it",
            "a key head is not split: one rank holds it, or several hold copies",
        )
