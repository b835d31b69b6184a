"""Observing any program: each class of ranks runs in a process of its own, in a fake world."""
