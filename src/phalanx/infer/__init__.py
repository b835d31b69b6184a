"""Text generation from a checkpoint (generate.py), alone or over tensor-parallel ranks (worker.py)."""
