"""The simulation of a shared cluster: jobs of a trace, GPUs of nodes, and a scheduling policy."""
