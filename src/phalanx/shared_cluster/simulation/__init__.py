"""Jobs on a shared cluster: arrivals from a trace, GPUs of nodes, a scheduling policy, and what comes of it."""
