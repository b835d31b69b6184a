"""Specifications written by a user: frozen data, checked on creation. No torch.

Read job.py and strategy/spec.py first, then model/spec.py and cluster/spec.py. files/ reads all of them from TOML.
"""
