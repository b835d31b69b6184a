"""What context parallelism asks of a model and a sequence: equal parts, for all its ranks.

cp = ring x ulysses: the ring passes keys and values round (Liu et al. 2023), Ulysses gives each of its ranks a part
of the heads (Jacobs et al. 2023). Both together: Fang & Zhao 2024, "USP".
"""

from __future__ import annotations

import math

from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local


def require_context(spec: ModelSpec, seq: int, s: Strategy) -> None:
    """Refuse ranks among which a sequence or its heads do not fall into equal parts."""
    if s.cp == 1:
        return
    chunks = 2 * s.ring if s.ring > 1 else 1
    for n, named in ((s.cp, f"strategy.cp = {s.cp}"), (chunks, f"{chunks}, the chunks of a ring of {s.ring}")):
        if seq % n:
            raise InputError(
                "job.seq", seq, f"does not divide by {named}", f"use a multiple of {math.lcm(s.cp, chunks)}"
            )
    held = local(spec, s)
    of_rank = f" of a tp rank ({spec.heads} / {s.tp})" if s.tp > 1 else ""
    if held.heads % s.ulysses:
        raise InputError(
            "strategy.ulysses",
            s.ulysses,
            f"does not divide model.heads = {held.heads}{of_rank}",
            "every rank takes as many heads",
        )
    if held.kv_heads % s.ulysses and s.ulysses % held.kv_heads:
        of_rank = f" of a tp rank ({spec.kv_heads} / {s.tp})" if s.tp > 1 else ""
        raise InputError(
            "strategy.ulysses",
            s.ulysses,
            f"neither divides model.kv_heads = {held.kv_heads}{of_rank} nor is a multiple of it",
            "key heads are held whole, by one rank or by several",
        )
