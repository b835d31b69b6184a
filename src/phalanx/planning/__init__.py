"""Choosing a strategy and explaining the choice. Read lookup.py first (the question), then search/. No torch."""
