"""Measurements: α, β, γ and kernel rates of real machines, and the lab of shaped hosts on a single one.

Read this_machine.py first: it measures and caches the machine that it runs on. all_hosts.py measures several hosts.
What they time is in collectives.py, links.py, kernels.py and microbenchmarks.py; fit.py fits lines to it. The lab
(lab.py) runs commands on virtual hosts.
"""
