"""Collective algorithms as data: the IR (read ir.py first), the algorithms, the registry that builds them by name,
the proof, and one rank's view."""
