"""Phalanx plans, proves, runs and measures the parallel training of large models."""

__version__ = "0.1.0"
