"""Observing a program that somebody wrote: one process a class of ranks, each with a fake world around it."""
