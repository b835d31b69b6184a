"""Where a strategy spends time and memory, and its anti-patterns. Read explanation.py first, then lint.py;
analytic.py and exact.py are the two ways to price what they look at."""
