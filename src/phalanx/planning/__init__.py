"""Choosing a strategy and explaining the choice. Read question.py first (what is asked), then search/. No torch."""
