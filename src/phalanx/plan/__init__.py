"""The search for the best strategy. No torch."""
