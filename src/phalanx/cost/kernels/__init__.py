"""Seconds of single kernels on a chip: products, attention, experts, all-reduces. Serving and training read it."""
