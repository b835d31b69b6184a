"""Pipeline schedules as pictures: a lane for each rank."""

from collections.abc import Sequence

from phalanx.cost.pipeline_time import Costs, PricedSchedule, price
from phalanx.report.pictures.figure import Lane, LaneBlock, Picture, Timeline
from phalanx.schedule.pipeline.proof import prove
from phalanx.schedule.pipeline.schedules import build
from phalanx.schedule.pipeline.simulate import strip_sends
from phalanx.spec.errors import InputError

_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_PALETTE = (
    *((_KINDS[letter], letter) for letter in "FBWI"),
    *((f"{_KINDS[letter.upper()]}, second chunk", letter) for letter in "biwf"),
)
_MOST_BLOCKS = 4_000


def schedules(rows: Sequence[tuple[str, PricedSchedule]], unit: str, source: str) -> Picture:
    """Draw schedules on one axis of time; `rows`: (suffix of the name, schedule). Raises InputError for more passes
    than a picture shows."""
    blocks = sum(len(passes) for _, p in rows for passes in p.times)
    if blocks > _MOST_BLOCKS:
        raise InputError("save", None, f"{blocks:,} passes are too many to draw", f"at most {_MOST_BLOCKS:,}")
    longest = max(p.makespan for _, p in rows)
    panels = []
    for suffix, p in rows:
        s = p.schedule
        lanes = []
        for rank in range(s.ranks):
            passes = []
            for action, (start, end) in zip(s.actions[rank], p.times[rank], strict=True):
                second = s.chunks > s.ranks and action.chunk // s.ranks % 2 == 1
                kind = _KINDS[action.kind] + (", second chunk" if second else "")
                passes.append(LaneBlock(start, end, str(action.micro_batch), kind))
            idle = 1 - p.work[rank] / p.makespan
            lanes.append(Lane(f"rank {rank}", passes, f"idle {idle:.0%}, {p.peak[rank]} live"))
        head = f"{s.name}{suffix}: {s.micro_batches} micro-batches, bubble {p.bubble_fraction:.1%} of the step"
        panels.append(Timeline(unit, tuple(lanes), head, longest, _PALETTE))
    names = ", ".join(p.schedule.name for _, p in rows)
    return Picture(
        f"Pipeline schedule{'s' * (len(rows) > 1)}: {names}",
        tuple(panels),
        source,
        "Numbers are micro-batches; live: activations held at once, in chunks.",
    )


def gallery(ranks: int = 4) -> Picture:
    """Draw the main schedules side by side, with twice as many micro-batches as ranks."""
    if not 1 <= ranks <= 16:
        raise InputError("ranks", ranks, "cannot be drawn", "use 1 to 16")
    drawn = []
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1"):
        schedule = build(name, ranks, 2 * ranks, None)
        prove(schedule)
        each = schedule.ranks / schedule.chunks
        drawn.append(("", price(strip_sends(schedule), Costs.equal(schedule.chunks, each, each, each, 0.0))))
    return schedules(
        drawn,
        "time: F, I and W take 1 each",
        "`phalanx pipeline show`: the schedules that are proved, priced and run",
    )
