"""Shared clusters: where a job's ranks go, what a queue of jobs waits for, and what fragmentation costs."""
