"""Which blocks of a model go into which pipeline chunk (read balance.py first), the search, and its lower bound."""
