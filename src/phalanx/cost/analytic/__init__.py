"""A step of any published software stack as terms: numbers or NumPy columns in, the same out. No torch."""
