"""Tokens that a model computes in each step of generation: requests, batches of their tokens, pages of the KV
cache."""
