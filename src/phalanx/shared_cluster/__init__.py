"""Shared clusters: placement of a job's ranks, simulation of a queue of jobs, and the cost of fragmentation."""
