"""The simulation of served requests: a discrete-event simulation of queueing and continuous batching."""
