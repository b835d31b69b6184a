"""The search over all legal strategies. Read space.py first (the search space), then planner.py (any stack, in two
passes) and best_first.py (our own runtime, by exact prices)."""

HEADROOM = 0.05
"""Default share of a device's memory that a search leaves free: predictions of memory are off by a few per cent, and
an allocator needs slack. All searches use it, so that their answers agree; `explain` and `lint` require it of a
strategy's neighbours, and `lint` reports a strategy that leaves less."""
