"""Measurements: α, β, γ and kernel rates of real machines.

Read this_machine.py first: it measures and caches the machine that it runs on. all_hosts.py measures several hosts.
What they time is in collectives.py, links.py, kernels.py and microbenchmarks.py; fit.py fits lines to it.
"""
