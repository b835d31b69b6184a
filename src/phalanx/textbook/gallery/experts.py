"""Pictures of experts: where tokens go, and a whole layer with its dispatch and combine."""

from dataclasses import replace

import numpy as np

from phalanx.planning.lookup import model_named
from phalanx.report.pictures.figure import Arrow, Bar, Bars, Box, Diagram, Label, Picture
from phalanx.schedule.layers.collectives import CoreRuns, communication
from phalanx.schedule.layers.routing import balanced_choices, expert_capacity, expert_traffic
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec, expert_layers
from phalanx.spec.strategy.spec import Strategy

_TOKENS = 10
"""The most tokens that are drawn one by one."""
_SEED = 3


def routing(model: str = "mixtral-8x7b", seq: int = 4096) -> Picture:
    """Draw which experts some tokens go to, and how many tokens each expert gets, takes and drops."""
    _, x = _with_experts(model)
    count = min(x.count, 16)
    small = replace(x, count=count, top_k=min(x.top_k, 4), groups=1, top_groups=1, group_score="max", capacity=1.25)
    draw = np.random.default_rng(_SEED)
    scores = draw.normal(size=(seq, count)) + 0.3 * draw.normal(size=count)  # some experts are liked better
    chosen = np.argsort(-scores, axis=1)[:, : small.top_k]
    capacity = expert_capacity(small, seq)
    assert capacity is not None
    items: list[Box | Arrow | Label] = [Label(0, 0, "token")]
    wide = 72 // count
    items += [Label(8 + wide * e, 0, f"e{e}") for e in range(count)]
    for t in range(min(_TOKENS, seq)):
        items.append(Label(2, 1 + t, str(t)))
        for e in range(count):
            picked = e in chosen[t]
            items.append(Box(8 + wide * e, 1 + t, wide - 1, 1, ("x" if picked else "",), 0 if picked else None))
    bars = []
    even = balanced_choices(seq, replace(small, capacity=None))
    for e in range(count):
        load = int((chosen == e).sum())
        kept = min(load, int(capacity))
        text = f"{kept:,}" + (f", {load - kept:,} dropped" if load > kept else "")
        bars.append(Bar(f"expert {e}", (("taken", float(kept)), ("dropped", float(load - kept))), text))
    dropped = sum(max(0, int((chosen == e).sum()) - int(capacity)) for e in range(count))
    return Picture(
        f"Routing: each token goes to {small.top_k} of {count} experts",
        (
            Diagram(tuple(items), f"The first {min(_TOKENS, seq)} tokens"),
            Bars(
                "tokens",
                tuple(bars),
                (("even", float(even[0])), ("capacity 1.25", float(capacity))),
                head=f"All {seq:,} tokens",
            ),
        ),
        f"scores drawn at random (seed {_SEED}), some experts liked better; capacity and the even share as the "
        "runtime, `phalanx verify` and prices have them (schedule/layers/routing.py)",
        f"Capacity 1.25 x top_k x tokens / experts drops {dropped:,} of {seq * small.top_k:,} choices here; without "
        "a capacity nothing is dropped, and the busiest expert sets the pace.",
    )


def moe_layer(model: str = "mixtral-8x7b", ranks: int = 4, seq: int = 4096) -> Picture:
    """Draw a layer of experts over ep ranks: route, dispatch, compute, combine, with what travels."""
    spec, x = _with_experts(model)
    if not 2 <= ranks <= 4 or x.count % ranks:
        remedy = f"use 2 to 4, a divisor of {x.count}"
        raise InputError("ranks", ranks, "does not fit the page or the experts", remedy)
    s = Strategy(dp=ranks, ep=ranks)
    rows = expert_traffic(x, s, seq)
    job = Job(ranks, seq, Precision("bfloat16"))
    sends = communication(spec, job, s, f"blocks.{expert_layers(spec)[0]}", "F", seq, rows=rows)
    sent = [c for c in sends if not isinstance(c, CoreRuns)]
    here = x.count // ranks
    items: list[Box | Arrow | Label] = []
    for r in range(ranks):
        y = 2 + 5 * r
        experts = f"{r * here}-{(r + 1) * here - 1}" if here > 1 else str(r)
        items += [
            Box(0, y, 14, 4, ("router", f"{seq:,} tokens"), r),
            Box(32, y, 17, 4, (f"experts {experts}", f"{int(rows.received):,} rows"), r),
            Box(66, y, 14, 4, ("weighted sum", f"{seq:,} tokens"), r),
        ]
        items += [Arrow(((x, y + 1), (to, y + 1))) for x, to in ((14, 16), (29, 31), (49, 50), (63, 65))]
    high = 5 * ranks - 1
    items += [Box(x, 2, 12, high, ("all-to-all",)) for x in (17, 51)]
    items += [Label(19, 0, "dispatch"), Label(53, 0, "combine")]
    names = ("counts", "rows to their experts", "results back")
    for i, c in enumerate(c for c in sent if c.op == "all_to_all"):
        line = f"all-to-all {i + 1}, {names[i]}: {_size(float(c.bytes))} of a rank, {c.dtype}"
        items.append(Label(0, high + 3 + i, line))
    return Picture(
        f"A whole layer of experts of {model} over {ranks} ranks, {seq:,} tokens on each",
        (Diagram(tuple(items)),),
        "the collectives of a block's forward pass (schedule/layers/collectives.py), with balanced routing, as "
        "`phalanx verify` records them",
        f"{seq:,} tokens x top {x.top_k} = {int(rows.rows):,} rows leave a rank, and {int(rows.received):,} arrive: "
        f"{(ranks - 1) / ranks:.0%} of them cross ranks. The backward pass sends both ways again.",
    )


def _with_experts(model: str) -> tuple[ModelSpec, Experts]:
    spec, _ = model_named(model)
    if spec.experts is None:
        raise InputError("model", model, "has no experts", "name one that has, such as mixtral-8x7b")
    return spec, spec.experts


def _size(n: float) -> str:
    return f"{n / 2**20:,.4g} MiB" if n >= 2**20 else f"{n:,.0f} B"
