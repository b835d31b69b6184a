"""Fits the constants that ship with predictions, from published runs: a developer's tool, not installed."""
