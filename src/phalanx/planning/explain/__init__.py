"""Explanation of a strategy's time and memory, and its anti-patterns. Read explanation.py first, then lint.py;
analytic.py and exact.py are the two ways to price them."""
