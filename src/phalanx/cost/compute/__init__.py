"""The work of each unit (FLOPs, bytes of memory traffic, kernels) and the seconds that a measured device takes for
it.

Read unit_work.py first.
"""
