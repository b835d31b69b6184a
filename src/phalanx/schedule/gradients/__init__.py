"""How gradients travel: the buckets that are reduced (read buckets.py first), and what compressed buckets send."""
