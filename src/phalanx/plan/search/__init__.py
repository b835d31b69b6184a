"""The search over all legal strategies. Read space.py first (what is searched), then planner.py (any stack, in two
passes) and best_first.py (our own runtime, by exact prices)."""
