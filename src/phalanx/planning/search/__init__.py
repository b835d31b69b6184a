"""The search over all legal strategies. Read space.py first (what is searched), then planner.py (any stack, in two
passes) and best_first.py (our own runtime, by exact prices)."""

HEADROOM = 0.05
"""Share of a device's memory that a search leaves free unless told otherwise: predictions of memory are off by a few
per cent, and an allocator needs room to move in. All commands that search take it, so that they answer alike;
`explain` and `lint` hold a strategy's neighbours to it, and `lint` says where a strategy leaves less."""
