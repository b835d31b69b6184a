"""The simulation of served requests: queueing and continuous batching, in events."""
