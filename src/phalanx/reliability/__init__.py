"""A training with its failures: effective time, days, money and energy, and what would help most."""
